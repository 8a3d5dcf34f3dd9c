"""Forward functions of exact mode in three implementations with the same bits: in torch (`reference`), as CPU kernels
(`kernel`) and as CUDA kernels (`kernel_cuda`). `forward_on` chooses by device."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from slimx.extras.exact.operations.forward import kernel, kernel_cuda, reference
from slimx.extras.exact.ordered import module_for


def forward_on(device: torch.device) -> ModuleType:
    """Returns the module with the forward functions of `reference.py` for tensors on `device`: kernels if available."""
    return module_for(device, kernel, kernel_cuda, reference)


class ExactForward(torch.autograd.Function):
    """Exact forward with the gradients of a plain torch function of the same inputs, recomputed in the backward
    pass."""

    @staticmethod
    def forward(
        ctx: Any,
        exact: Callable[..., torch.Tensor],
        plain: Callable[..., torch.Tensor],
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.plain = plain
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.plain(*inputs).to(gradient.dtype)
        return None, None, *torch.autograd.grad(out, inputs, gradient)
