"""Root-mean-square normalisation of exact mode."""

import torch
import torch.nn.functional as F

from slimx.extras.exact.operations.forward import Computed, forward_on


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in fp32, rounded to x's dtype once.

    x [..., hidden], weight [hidden].
    """

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return forward_on(x.device).rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps)

    return Computed.apply(exact, plain, x, weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum and the sum of x and residual, both [..., hidden]: the sum is rounded to x's dtype before it
    is normalised, as it is where a trainer adds in one module and normalises in the next."""
    total = x + residual
    return rms_norm(total, weight, eps), total
