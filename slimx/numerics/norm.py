"""Root-mean-square normalisation (Zhang and Sennrich, 1910.07467)."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; x [..., hidden], weight [hidden]."""
    return F.rms_norm(x, weight.shape, weight, eps)
