"""Root-mean-square normalization (RMSNorm; Zhang and Sennrich, arXiv 1910.07467)."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes `x / sqrt(mean(x^2) + eps) * weight`, with the mean over the last dimension. `x` [..., hidden], `weight`
    [hidden]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_scale(x: torch.Tensor, mean_square: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes this rank's part of the result of `rms_norm`, for features that are split over ranks, from the mean
    square of all features. `x` [..., part], `mean_square` [..., 1] in fp32, `weight` [part]. Computes in fp32; the
    result has the dtype of x."""
    return (x.float() * torch.rsqrt(mean_square + eps) * weight.float()).to(x.dtype)


def zero_centered_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes `rms_norm` with the weight `1 + weight` (Gemma, arXiv 2403.08295; Qwen3-Next). `x` [..., hidden].
    Computes in fp32, because bf16 is too imprecise for the sum; the result has the dtype of x."""
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
