"""Estimators of KL(policy || other) from the log-probs of tokens that the policy sampled (Schulman, "Approximating
KL")."""

import torch


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = other - logprobs, per token: unbiased, never negative, low variance."""
    difference = other - logprobs
    return torch.expm1(difference) - difference
