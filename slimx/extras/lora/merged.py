"""Merges a weight with its low-rank adapter, weight + scale * B A, with the same arithmetic for training, publications
and exports.

B A is an fp32 product with a fixed order of summation (`slimx.extras.exact.ordered`): the value of an element does not
depend on neighboring rows and columns, the number of threads or the device. The product times `scale`, and the sum with
the weight, are each rounded to fp32; the result is rounded once to the weight's dtype."""

from __future__ import annotations

from typing import Any

import torch

from slimx.extras.exact.ordered import product


@torch.no_grad()
def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns `weight` [out, in] plus `scale` times the product of b [out, rank] and a [rank, in], in new memory and in
    the weight's dtype."""
    change = product(b.float(), a.float().t())
    # Scaling and adding are separate operations, because a fused one rounds differently on different devices.
    return change.mul_(scale).add_(weight).to(weight.dtype)


class Merged(torch.autograd.Function):
    """Autograd function that computes `merged`, with gradients for a and b but none for the frozen weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return merged(weight, a, b, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Returns the gradients of a and b, computed in fp32, and None for weight and scale."""
        a, b = ctx.saved_tensors
        scaled = gradient.float() * ctx.scale
        return None, (b.float().t() @ scaled).to(a.dtype), (scaled @ a.float().t()).to(b.dtype), None
