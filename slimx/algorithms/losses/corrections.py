"""Importance weights and rejection that correct for the gap between trainer and engine: the engine's policy sampled the
tokens, but the loss ratio starts from the trainer's log-probs under the same weights
(`algorithm.old_logprobs: recompute`).

With w = trainer / engine, the ratio of probabilities per token or per sequence, the objective of each token is
multiplied by

- truncate: w, clamped to [low, high] (truncated importance sampling, fengyao.notion.site/off-policy-rl);
- icepop: w where low <= w <= high, else 0 (IcePop, 2510.18855; called masked importance sampling elsewhere).

In addition, rejection excludes tokens. As in slime, denominators still count all trained tokens.

A behavior policy that is several versions old causes a larger gap of the same kind. The weights are therefore also
those of decoupled PPO (AReaL, 2505.24298), in which the old log-probs are those of the proximal policy.
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
"""Function of log w per token [T], trained tokens (bool [T]) and `SequenceSum`. Returns the weights [T], and bool [T]:
True where w is outside the bounds."""
Rejection = Callable[[torch.Tensor, torch.Tensor, SequenceSum], torch.Tensor]
"""Function of log w per token [T], trained tokens (bool [T]) and `SequenceSum`. Returns bool [T]: True at trained
tokens to exclude."""


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
    """Computes importance weights, without a gradient, by the rule `kind`. For the other parameters and the result, see
    `Correction`. `low` and `high`: bounds of w.

    `level`: unit for which w is computed: the token, its sequence (the product over trained tokens), or the geometric
    mean over the sequence's trained tokens."""
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
    """Marks the tokens to exclude from the surrogate. For the other parameters and the result, see `Rejection`.

    A token is excluded if w is outside [low, high], or if the token-level w of any token in its sequence is below
    `veto` (slime uses 1e-4; 0 disables the veto). `level`: unit for which w is compared with the bounds (see
    `correction`); "none" disables the bounds."""
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

    `log_gap`: log(policy / engine) [T]. The tokens are excluded because the policy learns nothing from a mistake that
    it is now unlikely to make."""
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
    """Marks weights outside [low, high]. They are compared as logarithms, because the ratio of a long sequence may
    underflow."""
    inside = log_weight <= math.log(high)
    if low:
        inside = inside & (log_weight >= math.log(low))
    return ~inside
