"""The weight merged with a low-rank adapter, weight + scale * B A, by one rule for all uses.

B A is an fp32 product with a fixed order of summation (`slimx.extras.exact.ordered`): an element does not depend on the
neighbouring rows and columns, the number of threads or the device. The product times `scale`, and the sum with the
weight, are each rounded to fp32; the result is rounded once to the weight's dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from slimx.extras.exact.ordered import product


@torch.no_grad()
def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Merges weight [out, in], a [rank, in], b [out, rank] -> [out, in] of the weight's dtype, in new memory."""
    change = product(b.float(), a.float().t())
    # Two separate operations: a fused one rounds once on one device and twice on another.
    return change.mul_(scale).add_(weight).to(weight.dtype)


class Merged(torch.autograd.Function):
    """`merged` with gradients for a and b, and none for the frozen weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return merged(weight, a, b, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Computes products in fp32."""
        a, b = ctx.saved_tensors
        scaled = gradient.float() * ctx.scale
        return None, (b.float().t() @ scaled).to(a.dtype), (scaled @ a.float().t()).to(b.dtype), None
