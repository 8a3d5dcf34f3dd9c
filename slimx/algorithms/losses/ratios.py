"""Ratios of two policies' probabilities from differences of log-probs, finite with their gradient."""

from __future__ import annotations

import torch

LARGEST_LOG_RATIO = 20.0
"""Bound of a log-ratio. exp(20) is 5e8: far outside any bound of a ratio, and finite in fp32 with its square. verl and
OpenRLHF use the same bound."""


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), with log_ratio within +-`LARGEST_LOG_RATIO`; beyond it the ratio is constant and has no gradient.

    Unbounded, a log-ratio above 88 is infinite in fp32, and a clip behind it multiplies that by 0."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
