"""SwiGLU activation of exact mode."""

import torch
import torch.nn.functional as F

from slimx.extras.exact.operations.forward import ExactForward, forward_on


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up [..., n] in fp32 and rounds once to x's dtype. x [..., 2 n] contains the n gates, then
    the n ups."""
    return ExactForward.apply(_exact, _plain, x)


def _exact(x: torch.Tensor) -> torch.Tensor:
    out = forward_on(x.device).silu_and_mul(x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], x.shape[-1] // 2)


def _plain(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return F.silu(gate) * up
