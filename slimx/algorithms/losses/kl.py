"""KL divergences per token, [T], with gradient.

Estimators k1 to k3 of KL(policy || other) use the log-probs of sampled tokens (Schulman, "Approximating KL divergence",
joschu.net/blog/kl-approx.html).

`forward` and `reverse` compare distributions over a teacher's top-k tokens K and one bucket for all other tokens, the
tail. With q the teacher, p the policy, q_t = 1 - sum_K q and p_t = 1 - sum_K p:

    forward   sum_K q log(q / p) + q_t log(q_t / p_t)          KL(teacher || policy)
    reverse   sum_K p log(p / q) + p_t log(p_t / q_t)          KL(policy || teacher)

Both are KLs of coarsened distributions. By the log sum inequality (Cover and Thomas, Elements of Information Theory,
theorem 2.7.1) they are never above the KL over the whole vocabulary, and 0 if that KL is 0. The tail prevents the
policy from moving probability to tokens outside K; sums over K alone, rescaled to 1 or not, would not notice such a
shift. If K is the whole vocabulary, both are the exact KL.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slimx.algorithms.inputs import LARGEST_LOG_RATIO, TopLogprobs


def k1(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Computes log(policy / other), an unbiased estimate of KL(policy || other) with high variance; individual values
    may be negative."""
    return logprobs - other


def k2(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Computes half the squared log-ratio, a biased estimate of KL(policy || other); the mean of its gradient is
    nevertheless the gradient of that KL."""
    return 0.5 * (logprobs - other).square()


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Computes exp(d) - d - 1 with d = other - logprobs, per token: an unbiased, low-variance estimate of KL(policy ||
    other) that is never negative. d is clamped to at most 20 to keep the estimate finite in fp32 for tokens that are
    very unlikely under the policy; clamped tokens have no gradient."""
    difference = (other - logprobs).clamp(max=LARGEST_LOG_RATIO)
    return torch.expm1(difference) - difference


def low_variance(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Computes `k3` with its difference d clamped to +-20 and its result to +-10. The clamps keep the estimate finite
    for tokens with very different log-probs; clamped tokens have no gradient (verl's `low_var_kl`)."""
    difference = (other - logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (torch.expm1(difference) - difference).clamp(-10, 10)


Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "low_variance": low_variance}
"""KL estimators by their names in the configuration (`algorithm.kl_estimator`)."""

TopKL = Callable[[TopLogprobs], torch.Tensor]
"""Function that returns a KL divergence [T] between teacher and policy, with gradient with respect to the policy's
log-probs."""
ROUNDING = 2.0**-23
"""Tolerance for the teacher's tail probability, which is computed as 1 minus a sum of fp32 probabilities: a value up to
this may be mere rounding error."""


def forward(top: TopLogprobs) -> torch.Tensor:
    """Computes KL(teacher || policy), [T], over the teacher's top-k tokens and one bucket for all other tokens, by the
    formula in the module's docstring."""
    tail, log_tail = _teacher_tail(top)
    divergence = (top.teacher.exp() * (top.teacher - top.policy)).sum(-1)
    return divergence + torch.where(tail > 0, tail * (log_tail - top.policy_rest), 0.0)


def reverse(top: TopLogprobs) -> torch.Tensor:
    """Computes KL(policy || teacher), [T], over the teacher's top-k tokens and one bucket for all other tokens, by the
    formula in the module's docstring. The teacher's tail probability is clamped to at least `ROUNDING`."""
    _, log_tail = _teacher_tail(top)
    divergence = (top.policy.exp() * (top.policy - top.teacher)).sum(-1)
    return divergence + top.policy_rest.exp() * (top.policy_rest - log_tail)


def _teacher_tail(top: TopLogprobs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors [T]: the teacher's total probability of the tokens outside its top k, set to 0 where it is at
    most `ROUNDING`, and the logarithm of this probability, clamped to at least log(`ROUNDING`)."""
    tail = 1 - top.teacher.exp().sum(-1)
    return torch.where(tail > ROUNDING, tail, 0.0), tail.clamp_min(ROUNDING).log()


DIRECTIONS: dict[str, TopKL] = {"forward": forward, "reverse": reverse}
