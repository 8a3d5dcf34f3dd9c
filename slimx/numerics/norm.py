"""Root-mean-square normalization (Zhang and Sennrich, 1910.07467)."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes `x / sqrt(mean(x^2) + eps) * weight` over the last dimension; x [..., hidden]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_scale(x: torch.Tensor, mean_square: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalizes a part of the features like `rms_norm`, given the mean square of all.

    x [..., part], mean_square [..., 1] fp32, weight [part]; computed in fp32, in x's dtype."""
    return (x.float() * torch.rsqrt(mean_square + eps) * weight.float()).to(x.dtype)


def zero_centred_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes `rms_norm` with the factor `1 + weight` (Gemma, 2403.08295; Qwen3-Next), x [..., hidden].

    Computed in fp32, returned in x's dtype: bf16 has too few bits for the sum."""
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
