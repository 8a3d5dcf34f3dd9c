"""Sums over the tensor-parallel ranks of an SGLang server in exact mode. Written for sglang 0.5.23.

Every rank gathers all partial sums and adds them in the order of the binary tree. All ranks except the first then
return zeros, so that SGLang's own sum over ranks equals the first rank's value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gathered(part: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Gathers `part` from every rank in `group`, an SGLang GroupCoordinator, and returns the tensors in rank order."""
    parts = [torch.empty_like(part) for _ in range(group.world_size)]
    dist.all_gather(parts, part.contiguous(), group=group.device_group)
    return parts


def first_rank_only(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` on the first tensor-parallel rank, and zeros on all others."""
    from sglang.srt.runtime_context import get_parallel

    return x if get_parallel().tp_rank == 0 else torch.zeros_like(x)
