"""The gated activation of exact mode."""

from typing import Any

import torch
import torch.nn.functional as F

from slimx.extras.exact.operations.forward import forward_on


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gated activation silu(gate) * up in fp32, rounded to x's dtype once: x [..., 2 n], gates then ups -> [..., n]."""
    return _SiluAndMul.apply(x)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        out = forward_on(x.device).silu_and_mul(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            gate, up = x.float().chunk(2, dim=-1)
            y = (F.silu(gate) * up).to(x.dtype)
        return torch.autograd.grad(y, x, gradient)[0]
