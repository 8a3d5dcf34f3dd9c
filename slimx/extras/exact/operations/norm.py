"""Root-mean-square normalisation of exact mode."""

from typing import Any

import torch
import torch.nn.functional as F

from slimx.extras.exact.operations.forward import forward_on


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in fp32, rounded to x's dtype once.

    x [..., hidden], weight [hidden].
    """
    return _RmsNorm.apply(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum and the sum of x and residual, both [..., hidden]: the sum is rounded to x's dtype before it
    is normalised, as it is where a trainer adds in one module and normalises in the next."""
    total = x + residual
    return rms_norm(total, weight, eps), total


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return forward_on(x.device).rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = F.rms_norm(x.float(), weight.shape, weight.float(), ctx.eps).to(x.dtype)
        return *torch.autograd.grad(y, (x, weight), gradient), None
