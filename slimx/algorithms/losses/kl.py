"""Estimators of KL(policy || other) per token, from the log-probs of tokens that the policy sampled (Schulman,
"Approximating KL divergence", joschu.net/blog/kl-approx.html). All take and return [T], with gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slimx.algorithms.inputs import LARGEST_LOG_RATIO


def k1(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log(policy / other): unbiased, of high variance, of either sign."""
    return logprobs - other


def k2(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Half the squared log ratio: biased, and its gradient's mean is that of the KL."""
    return 0.5 * (logprobs - other).square()


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = other - logprobs, per token: unbiased, never negative, low variance. d is at most 20, so
    that a token which the policy hardly knows stays finite in fp32; beyond it there is no gradient."""
    difference = (other - logprobs).clamp(max=LARGEST_LOG_RATIO)
    return torch.expm1(difference) - difference


def low_variance(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """k3 of a difference within +-20, itself within +-10: a token that the two judge wildly differently stays finite,
    and beyond these bounds has no gradient (verl's `low_var_kl`)."""
    difference = (other - logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (torch.expm1(difference) - difference).clamp(-10, 10)


Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "low_variance": low_variance}
"""Estimators by the names that the configuration uses."""
