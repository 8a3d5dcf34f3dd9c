"""Weights for the gap between trainer and engine: tokens were sampled by the engine's policy, and the ratio of the loss
begins at the trainer's own log-probs of the same weights (`algorithm.old_logprobs: recompute`).

With w = trainer / engine, per token or per sequence, the objective of each token is multiplied by

- truncate: w, within [low, high] (truncated importance sampling, fengyao.notion.site/off-policy-rl);
- icepop: w where low <= w <= high, else 0 (IcePop, 2510.18855);
- mask: 1 where low <= w <= high, else 0.

As a behaviour policy that is several versions old is a larger gap of the same kind, these are also the weights of
decoupled PPO (AReaL, 2505.24298): there the old log-probs are those of the proximal policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from slimx.algorithms.inputs import SequenceSum
from slimx.algorithms.surrogates import LARGEST_LOG_RATIO

Kind = Literal["truncate", "icepop", "mask"]
Level = Literal["token", "sequence", "geometric"]
Correction = Callable[[torch.Tensor, torch.Tensor, SequenceSum], tuple[torch.Tensor, torch.Tensor]]
"""(log w per token [T], trained bool [T], sums over sequences) -> (weights [T], bool [T]: w outside the bounds)."""


def correction(kind: Kind, *, level: Level, low: float, high: float) -> Correction:
    """`level`: whose w it is: each token's own, its sequence's (the product over trained tokens), or the geometric mean
    of them. No weight has a gradient."""

    def weights(
        log_gap: torch.Tensor, trained: torch.Tensor, sequence_sum: SequenceSum
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_gap = torch.where(trained, log_gap.detach(), 0.0)
        if level != "token":
            whole = sequence_sum(log_gap)
            count = sequence_sum(trained.to(log_gap.dtype)).clamp(min=1)
            log_gap = whole if level == "sequence" else whole / count
        ratio = log_gap.clamp(max=LARGEST_LOG_RATIO).exp()
        inside = (ratio >= low) & (ratio <= high)
        if kind == "truncate":
            return ratio.clamp(low, high), trained & ~inside
        return torch.where(inside, ratio if kind == "icepop" else torch.ones_like(ratio), 0.0), trained & ~inside

    return weights
