"""The output layer of exact mode: `slimx.numerics.mode.Head`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slimx.extras.exact import operations as exact


def product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns logits [T, V / TP] of hidden [T, h] and weight [V / TP, h]."""
    return exact.linear(hidden, weight)


def logprobs(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns the log-probs [T] of labels [T] from scaled fp32 logits [T, V / TP]; every rank of `group` gathers full
    rows."""
    if group is not None and group.size() > 1:
        shards = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(shards, logits, group=group)
        logits = torch.cat(shards, dim=1)
    return exact.token_logprobs(logits, labels)
