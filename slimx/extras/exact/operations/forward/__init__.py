"""Forward functions of exact mode, in three implementations whose results are bitwise equal: torch (`reference`), CPU
kernels (`kernel`) and CUDA kernels (`kernel_cuda`). `forward_on` selects one by device."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from slimx.extras.exact.operations.forward import kernel, kernel_cuda, reference
from slimx.extras.exact.ordered import module_for


def forward_on(device: torch.device) -> ModuleType:
    """Returns the module that implements the forward functions for tensors on `device`: `kernel` or `kernel_cuda` if
    its kernels are available, otherwise `reference`."""
    return module_for(device, kernel, kernel_cuda, reference)


class ExactForward(torch.autograd.Function):
    """Autograd function whose forward pass is `exact` and whose gradients are those of `plain`, an ordinary torch
    function of the same inputs that the backward pass recomputes."""

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
