"""The weight that a low-rank adapter makes: weight + scale * B A, by one rule wherever it is computed.

B A is a product in fp32 with one order of sums (`slimx.extras.exact.ordered`), so that an element does not depend on
the rows and columns beside it, the number of threads or the device; times `scale`, plus the weight, each rounded to
fp32; then rounded once to the weight's dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from slimx.extras.exact.ordered import product


@torch.no_grad()
def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """weight [out, in], a [rank, in], b [out, rank] -> [out, in] of the weight's dtype, in memory of its own."""
    change = product(b.float(), a.float().t())
    # Two operations and not one: what fuses them rounds once on one device and twice on another.
    return change.mul_(scale).add_(weight).to(weight.dtype)


class Merged(torch.autograd.Function):
    """`merged` with gradients for a and b; the weight stays as it is and gets none."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return merged(weight, a, b, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Products in fp32."""
        a, b = ctx.saved_tensors
        whole = gradient.float() * ctx.scale
        return None, (b.float().t() @ whole).to(a.dtype), (whole @ a.float().t()).to(b.dtype), None
