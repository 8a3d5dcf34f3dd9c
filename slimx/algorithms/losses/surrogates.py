"""Objectives that a policy gradient maximises, token by token: one function per published objective.

Each function takes `LossTokens` and the objective's own numbers, and gives the objective [T], whose gradient is with
respect to `logprobs`, and where it was held back [T]: there the token's gradient is not that of ratio x advantage.
Objectives over whole sequences (GSPO, TOPR) need sums that no single rank may have, and get them without gradient; a
term of value 0 carries it instead, so that every token adds its own part wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slimx.algorithms.inputs import SequenceSum, bounded_ratio
from slimx.data.columns import LossColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """Per-token tensors, each [T]."""

    logprobs: torch.Tensor
    """The policy's, with gradient; 0 where not trained."""
    log_ratio: torch.Tensor
    """log(policy / old), with gradient; 0 where not trained."""
    advantages: torch.Tensor
    trained: torch.Tensor
    """bool."""
    columns: LossColumns[torch.Tensor]
    """The micro-batch's, which may have any value where not trained."""
    sequence_sum: SequenceSum


Objective = tuple[torch.Tensor, torch.Tensor]
"""The objective [T], and bool [T]: where it was held back."""
Surrogate = Callable[[LossTokens], Objective]


def clip(tokens: LossTokens, *, low: float, high: float, dual: float | None = None) -> Objective:
    """The clipped objective min(ratio A, clamp(ratio, 1 - low, 1 + high) A).

    The source is PPO (1707.06347); with `high` > `low` it is that of DAPO (2503.14476).

    `dual`: with a negative advantage the objective is at least `dual` x A, so that a ratio beyond `dual` pushes no
    further (dual-clip PPO, 1912.09729)."""
    return _clipped(tokens.log_ratio, tokens.advantages, low, high, dual)


def gspo(tokens: LossTokens, *, low: float, high: float) -> Objective:
    """The clipped objective with one ratio per sequence, the geometric mean of its tokens' (GSPO, 2507.18071).

    In the form that the paper calls GSPO-token: the sequence's ratio is a number, multiplied by each token's
    policy / stop-gradient(policy) = 1. Value and gradient are GSPO's where all tokens of a sequence share their
    advantage and their weight; else each token's advantage counts for itself."""
    constant = tokens.log_ratio.detach()
    count = tokens.sequence_sum(tokens.trained.to(constant.dtype)).clamp(min=1)
    mean = tokens.sequence_sum(constant) / count
    return _clipped(mean + tokens.log_ratio - constant, tokens.advantages, low, high)


def cispo(tokens: LossTokens, *, low: float, high: float) -> Objective:
    """A clipped weight, and no token without a gradient: stop-gradient(clamp(ratio, 1 - low, 1 + high)) A log policy
    (CISPO, MiniMax-M1, 2506.13585)."""
    ratio = bounded_ratio(tokens.log_ratio.detach())
    weight = ratio.clamp(1 - low, 1 + high)
    return weight * tokens.advantages * tokens.logprobs, weight != ratio


def topr(tokens: LossTokens) -> Objective:
    """A log policy for positive advantages; for negative ones times the sequence's ratio, at most 1 (TOPR, 2503.14286):
    what was bad and has become unlikely is pushed no further."""
    whole = tokens.sequence_sum(tokens.log_ratio.detach())
    negative = tokens.advantages < 0
    weight = torch.where(negative, whole.clamp(max=0).exp(), 1.0)
    return weight * tokens.advantages * tokens.logprobs, negative & (whole > 0)


def sapo(tokens: LossTokens, *, tau_positive: float, tau_negative: float) -> Objective:
    """(4 / tau) sigmoid(tau (ratio - 1)) A with a temperature per sign of A (SAPO, 2511.20347): the clip made smooth,
    with the gradient of ratio x A at ratio 1."""
    positive = (tokens.advantages > 0).to(tokens.log_ratio.dtype)
    tau = tau_negative + (tau_positive - tau_negative) * positive
    ratio = bounded_ratio(tokens.log_ratio)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return gate * tokens.advantages, torch.zeros_like(tokens.trained)


def clip_cov(tokens: LossTokens, *, low: float, high: float, **selection: float) -> Objective:
    """The clipped objective, and 0 at the selected tokens (Clip-Cov, 2505.22617). `selection`: parameters by which they
    were selected."""
    value, held = _clipped(tokens.log_ratio, tokens.advantages, low, high)
    selected = tokens.columns.selected > 0
    return torch.where(selected, 0.0, value), held | selected


def kl_cov(tokens: LossTokens, *, coef: float, **selection: float) -> Objective:
    """The objective ratio A, minus `coef` |log ratio| at the selected tokens (KL-Cov, 2505.22617). `selection`: as of
    `clip_cov`."""
    value, selected = bounded_ratio(tokens.log_ratio) * tokens.advantages, tokens.columns.selected > 0
    return value - coef * torch.where(selected, tokens.log_ratio.abs(), 0.0), selected


def plain(tokens: LossTokens) -> Objective:
    """A log policy (REINFORCE): for advantages that say by themselves how far to go."""
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
