"""Sums over the ranks of an SGLang server in exact mode. Written for sglang 0.5.23.

Every rank gathers the others' partial sums and adds them in the order of the tree; all ranks but the first return
zeros. SGLang's own sum over ranks then equals the first rank's value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gathered(part: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Returns every rank's `part`, in rank order of `group` (SGLang's GroupCoordinator)."""
    parts = [torch.empty_like(part) for _ in range(group.world_size)]
    dist.all_gather(parts, part.contiguous(), group=group.device_group)
    return parts


def first_rank_only(x: torch.Tensor) -> torch.Tensor:
    """Returns x on the first rank of tensor parallelism, zeros on all others."""
    from sglang.srt.runtime_context import get_parallel

    return x if get_parallel().tp_rank == 0 else torch.zeros_like(x)
