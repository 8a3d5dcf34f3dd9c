"""The output layer of exact mode, which implements `slimx.numerics.mode.Head`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slimx.extras.exact import operations as exact


def product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes this rank's logits [T, V / TP] from hidden states `hidden` [T, h] and its rows of the output layer,
    `weight` [V / TP, h]."""
    return exact.linear(hidden, weight)


def logprobs(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Computes the log-probs [T] of `labels` [T] from this rank's fp32 `logits` [T, V / TP], already divided by the
    temperature. Every rank of `group` gathers the logits of the whole vocabulary; `group` is None if `logits` already
    contain it."""
    if group is not None and group.size() > 1:
        shards = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(shards, logits, group=group)
        logits = torch.cat(shards, dim=1)
    return exact.token_logprobs(logits, labels)
