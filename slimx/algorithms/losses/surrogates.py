"""Objectives that a policy gradient maximizes, token by token: one function per published objective.

Each function takes `LossTokens` and the objective's parameters. It returns the objective [T], with gradient with
respect to `logprobs`, and bool [T]: True where the objective is clipped, so that its gradient is not that of ratio * A.
In formulas, A is the advantage and ratio is policy / old.

Objectives over full sequences (GSPO, TOPR) need sums over tokens on several context-parallel ranks, and receive these
sums without a gradient. A term of value 0 carries the gradient instead, so that every token contributes its part on its
own rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slimx.algorithms.inputs import SequenceSum, bounded_ratio
from slimx.data.columns import LossColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """Per-token tensors of a micro-batch, each [T], from which objectives are computed."""

    logprobs: torch.Tensor
    """Log-probs under the policy, with gradient; 0 at tokens that are not trained on."""
    log_ratio: torch.Tensor
    """log(policy / old), with gradient; 0 at tokens that are not trained on."""
    advantages: torch.Tensor
    trained: torch.Tensor
    """bool: True at trained tokens."""
    columns: LossColumns[torch.Tensor]
    """Columns of the micro-batch, with arbitrary values at tokens that are not trained on."""
    sequence_sum: SequenceSum


Objective = tuple[torch.Tensor, torch.Tensor]
"""Pair (objective [T], bool [T] that is True where the objective is clipped)."""
Surrogate = Callable[[LossTokens], Objective]


def clip(tokens: LossTokens, *, low: float, high: float, dual: float | None = None) -> Objective:
    """Computes the clipped objective min(ratio * A, clamp(ratio, 1 - low, 1 + high) * A): that of PPO (1707.06347), or
    with `high` > `low` that of DAPO (2503.14476).

    `dual`: with a negative advantage the objective is at least `dual` * A, so increasing a ratio beyond `dual` has no
    further effect (dual-clip PPO, 1912.09729)."""
    return _clipped(tokens.log_ratio, tokens.advantages, low, high, dual)


def gspo(tokens: LossTokens, *, low: float, high: float) -> Objective:
    """Computes the clipped objective with one ratio per sequence: the geometric mean of its tokens' ratios (GSPO,
    2507.18071).

    This is the paper's variant GSPO-token: the sequence's ratio is a constant that is multiplied by each token's policy
    / stop-gradient(policy) = 1. Value and gradient are those of GSPO if all tokens of a sequence have the same
    advantage and weight; otherwise each token uses its own advantage and weight."""
    constant = tokens.log_ratio.detach()
    count = tokens.sequence_sum(tokens.trained.to(constant.dtype)).clamp(min=1)
    mean = tokens.sequence_sum(constant) / count
    return _clipped(mean + tokens.log_ratio - constant, tokens.advantages, low, high)


def cispo(tokens: LossTokens, *, low: float, high: float) -> Objective:
    """Computes stop-gradient(clamp(ratio, 1 - low, 1 + high)) * A * log(policy): only the weight is clipped, so every
    token keeps a gradient (CISPO, MiniMax-M1, 2506.13585)."""
    ratio = bounded_ratio(tokens.log_ratio.detach())
    weight = ratio.clamp(1 - low, 1 + high)
    return weight * tokens.advantages * tokens.logprobs, weight != ratio


def topr(tokens: LossTokens) -> Objective:
    """Computes A * log(policy). Where A < 0, this objective is multiplied by the sequence's importance ratio, clipped
    at 1, so that bad sequences that have become unlikely are hardly suppressed further (TOPR, 2503.14286)."""
    total = tokens.sequence_sum(tokens.log_ratio.detach())
    negative = tokens.advantages < 0
    weight = torch.where(negative, total.clamp(max=0).exp(), 1.0)
    return weight * tokens.advantages * tokens.logprobs, negative & (total > 0)


def sapo(tokens: LossTokens, *, tau_positive: float, tau_negative: float) -> Objective:
    """Computes (4 / tau) * sigmoid(tau * (ratio - 1)) * A, with one temperature tau for positive advantages and another
    for all others (SAPO, 2511.20347): a smooth clip that has the gradient of ratio * A at ratio 1."""
    positive = (tokens.advantages > 0).to(tokens.log_ratio.dtype)
    tau = tau_negative + (tau_positive - tau_negative) * positive
    ratio = bounded_ratio(tokens.log_ratio)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return gate * tokens.advantages, torch.zeros_like(tokens.trained)


def clip_cov(tokens: LossTokens, *, low: float, high: float, **selection: float) -> Objective:
    """Computes the clipped objective of `clip`, and 0 at the tokens that were selected by covariance
    (`LossColumns.selected`; Clip-Cov, 2505.22617). `selection`: parameters of the selection, which are not used
    here."""
    value, clipped = _clipped(tokens.log_ratio, tokens.advantages, low, high)
    selected = _selected(tokens)
    return torch.where(selected, 0.0, value), clipped | selected


def kl_cov(tokens: LossTokens, *, coef: float, **selection: float) -> Objective:
    """Computes ratio * A, minus `coef` * |log(ratio)| at the tokens that were selected by covariance
    (`LossColumns.selected`; KL-Cov, 2505.22617). `selection`: parameters of the selection, which are not used here."""
    value = bounded_ratio(tokens.log_ratio) * tokens.advantages
    selected = _selected(tokens)
    return value - coef * torch.where(selected, tokens.log_ratio.abs(), 0.0), selected


def _selected(tokens: LossTokens) -> torch.Tensor:
    assert tokens.columns.selected is not None
    return tokens.columns.selected > 0


def plain(tokens: LossTokens) -> Objective:
    """Computes A * log(policy) (REINFORCE), without clipping. Meant for estimators whose advantages already limit the
    size of a step."""
    return tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.trained)


def _clipped(
    log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float | None = None
) -> Objective:
    ratio = bounded_ratio(log_ratio)
    free = ratio * advantages
    value = torch.minimum(free, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        value = torch.where(advantages < 0, torch.maximum(value, dual * advantages), value)
    return value, value != free
