"""KL divergences per token, [T], with gradient.

Estimators k1 to k3 of KL(policy || other) from the log-probs of sampled tokens (Schulman, "Approximating KL
divergence", joschu.net/blog/kl-approx.html).

Over a teacher's top-k tokens and all others together, with q the teacher, p the policy, K the k tokens, and one bucket
for the tail, q_t = 1 - sum_K q and p_t = 1 - sum_K p:

    forward   sum_K q log(q / p) + q_t log(q_t / p_t)          KL(teacher || policy)
    reverse   sum_K p log(p / q) + p_t log(p_t / q_t)          KL(policy || teacher)

Both are KLs of coarsened distributions: by the log sum inequality (Cover and Thomas, Elements of Information Theory,
theorem 2.7.1) never above the KL over the whole vocabulary, and 0 if that is 0. The tail prevents the policy from
moving probability to tokens outside K, which sums over K alone, rescaled to 1 or not, would not notice. If K is the
whole vocabulary, both are the exact KL.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slimx.algorithms.inputs import LARGEST_LOG_RATIO, TopLogprobs


def k1(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Computes log(policy / other): unbiased, high variance, either sign."""
    return logprobs - other


def k2(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Computes half the squared log ratio: biased, but the mean of its gradient is that of the KL."""
    return 0.5 * (logprobs - other).square()


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Computes exp(d) - d - 1 with d = other - logprobs, per token: unbiased, never negative, low variance. d is at
    most 20, so tokens that are very unlikely under the policy stay finite in fp32; beyond it there is no gradient."""
    difference = (other - logprobs).clamp(max=LARGEST_LOG_RATIO)
    return torch.expm1(difference) - difference


def low_variance(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Computes k3 of a difference within +-20, bounded to +-10: tokens with very different log-probs stay finite, and
    have no gradient beyond these bounds (verl's `low_var_kl`)."""
    difference = (other - logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (torch.expm1(difference) - difference).clamp(-10, 10)


Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "low_variance": low_variance}
"""Estimators by their names in the configuration."""

TopKL = Callable[[TopLogprobs], torch.Tensor]
"""[T], with gradient with respect to the policy's log-probs."""
ROUNDING = 2.0**-23
"""The teacher's tail is 1 minus a sum of fp32 numbers: values up to this are rounding errors."""


def forward(top: TopLogprobs) -> torch.Tensor:
    """Computes KL(teacher || policy), [T]."""
    tail, log_tail = _teacher_tail(top)
    divergence = (top.teacher.exp() * (top.teacher - top.policy)).sum(-1)
    return divergence + torch.where(tail > 0, tail * (log_tail - top.policy_rest), 0.0)


def reverse(top: TopLogprobs) -> torch.Tensor:
    """Computes KL(policy || teacher), [T]. A teacher's tail within rounding counts as `ROUNDING`."""
    _, log_tail = _teacher_tail(top)
    divergence = (top.policy.exp() * (top.policy - top.teacher)).sum(-1)
    return divergence + top.policy_rest.exp() * (top.policy_rest - log_tail)


def _teacher_tail(top: TopLogprobs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the teacher's probability of all other tokens, 0 if within rounding, and its logarithm, at least that of
    `ROUNDING`; each [T]."""
    tail = 1 - top.teacher.exp().sum(-1)
    return torch.where(tail > ROUNDING, tail, 0.0), tail.clamp_min(ROUNDING).log()


DIRECTIONS: dict[str, TopKL] = {"forward": forward, "reverse": reverse}
