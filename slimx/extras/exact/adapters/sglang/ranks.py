"""Sums over the ranks of an SGLang server in exact mode. Written for sglang 0.5.23.

Every rank gathers the others' partial sums, adds them in the order of the tree, and all but the first return zeros: the
sum over ranks, which SGLang makes wherever it likes, is then the first rank's value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gathered(part: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Every rank's `part`, in the order of ranks of `group` (SGLang's GroupCoordinator)."""
    parts = [torch.empty_like(part) for _ in range(group.world_size)]
    dist.all_gather(parts, part.contiguous(), group=group.device_group)
    return parts


def of_first_rank(x: torch.Tensor) -> torch.Tensor:
    """x on the first rank of tensor parallelism, zeros on all others."""
    from sglang.srt.runtime_context import get_parallel

    return x if get_parallel().tp_rank == 0 else torch.zeros_like(x)
