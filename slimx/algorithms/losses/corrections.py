"""Weights and rejection for the gap between trainer and engine: the engine's policy sampled the tokens, but the loss
ratio starts from the trainer's log-probs of the same weights (`algorithm.old_logprobs: recompute`).

With w = trainer / engine, per token or per sequence, the objective of each token is multiplied by

- truncate: w, within [low, high] (truncated importance sampling, fengyao.notion.site/off-policy-rl);
- icepop: w where low <= w <= high, else 0 (IcePop, 2510.18855; masked importance sampling elsewhere).

In addition, rejection excludes tokens. Denominators stay those of all trained tokens, as in slime.

Since a behaviour policy that is several versions old is a larger gap of the same kind, these are also the weights of
decoupled PPO (AReaL, 2505.24298), where the old log-probs are those of the proximal policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch

from slimx.algorithms.inputs import SequenceSum, bounded_ratio

Kind = Literal["truncate", "icepop"]
Level = Literal["token", "sequence", "geometric"]
Correction = Callable[[torch.Tensor, torch.Tensor, SequenceSum], tuple[torch.Tensor, torch.Tensor]]
"""(log w per token [T], trained bool [T], sums over sequences) -> (weights [T], bool [T]: w outside the bounds)."""
Rejection = Callable[[torch.Tensor, torch.Tensor, SequenceSum], torch.Tensor]
"""(log w per token [T], trained bool [T], sums over sequences) -> bool [T]: excluded trained tokens."""


def correction(
    log_gap: torch.Tensor,
    trained: torch.Tensor,
    sequence_sum: SequenceSum,
    *,
    kind: Kind,
    level: Level,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes importance weights by the rule `kind`, without a gradient (`Correction`).

    `level`: unit of w: the token, its sequence (the product over trained tokens), or the geometric mean over it."""
    log_weight = _log_weight(log_gap, trained, sequence_sum, level)
    ratio = bounded_ratio(log_weight)
    outside = _outside(log_weight, low, high)
    if kind == "truncate":
        return ratio.clamp(low, high), trained & outside
    return torch.where(outside, 0.0, ratio), trained & outside


def rejection(
    log_gap: torch.Tensor,
    trained: torch.Tensor,
    sequence_sum: SequenceSum,
    *,
    level: Literal["none"] | Level,
    low: float,
    high: float,
    veto: float,
) -> torch.Tensor:
    """Marks rejected tokens (`Rejection`): those with w, at the levels of a correction, outside [low, high], and all
    tokens of sequences in which a single token's w is below `veto` (slime: 1e-4; 0: off)."""
    out = torch.zeros_like(trained)
    if level != "none":
        out = out | _outside(_log_weight(log_gap, trained, sequence_sum, level), low, high)
    if veto:
        below = trained & (log_gap.detach() < math.log(veto))
        out = out | (sequence_sum(below.to(log_gap.dtype)) > 0)
    return trained & out


def off_policy_sequences(
    log_gap: torch.Tensor,
    advantages: torch.Tensor,
    trained: torch.Tensor,
    sequence_sum: SequenceSum,
    *,
    delta: float,
) -> torch.Tensor:
    """Marks the tokens that off-policy sequence masking excludes, bool [T]: those with a negative advantage in a
    sequence whose mean of log(engine / policy) is above `delta` (DeepSeek-V3.2, 2512.02556).

    `log_gap`: log(policy / engine) [T]. A mistake that the current policy is unlikely to make teaches it nothing."""
    log_gap = torch.where(trained, log_gap.detach(), 0.0)
    count = sequence_sum(trained.to(log_gap.dtype)).clamp(min=1)
    return trained & (advantages < 0) & (-sequence_sum(log_gap) / count > delta)


def _log_weight(log_gap: torch.Tensor, trained: torch.Tensor, sequence_sum: SequenceSum, level: Level) -> torch.Tensor:
    log_gap = torch.where(trained, log_gap.detach(), 0.0)
    if level == "token":
        return log_gap
    total = sequence_sum(log_gap)
    if level == "sequence":
        return total
    return total / sequence_sum(trained.to(log_gap.dtype)).clamp(min=1)


def _outside(log_weight: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Marks weights outside [low, high], compared as logarithms: a long sequence's weight may underflow as a ratio."""
    inside = log_weight <= math.log(high)
    if low:
        inside = inside & (log_weight >= math.log(low))
    return ~inside
