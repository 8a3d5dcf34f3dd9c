"""RMSNorm of exact mode."""

import torch
import torch.nn.functional as F

from slimx.extras.exact.operations.forward import ExactForward, forward_on


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes `x / sqrt(mean(x^2) + eps) * weight` over the last dimension in fp32, and rounds once to x's dtype.

    `x` [..., hidden], `weight` [hidden].
    """

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return forward_on(x.device).rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps)

    return ExactForward.apply(exact, plain, x, weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns RMSNorm(x + residual), and x + residual, both [..., hidden].

    The sum is rounded to x's dtype before the norm, as in a trainer, which adds in one module and normalizes in the
    next.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
