"""The three matrix products of a linear layer in fp8, by the rounding of a publication.

Their operands are rounded as by Transformer Engine's recipes `Float8BlockScaling` (with fp32 scales) and
`MXFP8BlockScaling`: in blocks along the dimension that the product sums over, each time from the unrounded tensor. So a
tensor that two products need is rounded twice, once along its rows and once along its columns, except for weights in
square blocks. Tensor cores multiply codes and apply scales to sums of a block; here code times scale is one fp32
number, and the sum is fp32, so results agree but for the rounding of fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from slimx.extras.low_precision.blocks import dequantise, quantise
from slimx.extras.low_precision.recipes import Recipe
from slimx.reshard.kernels.record import RULE


def linear(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """x [..., in] times weight [out, in], transposed -> [..., out] of x's dtype, with the recipe's gradients."""
    return _Linear.apply(x, weight, recipe)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.recipe, ctx.shape = recipe, x.shape
        out = _rounded(rows, recipe, recipe.vector) @ _rounded(weight, recipe, recipe.weight).T
        return out.to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        rows, weight = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        above = gradient.reshape(-1, gradient.shape[-1])
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            square = recipe.weight[0] == recipe.weight[1]
            wide = _rounded(weight, recipe, recipe.weight) if square else _rounded(weight.T, recipe, recipe.weight).T
            of_x = (_rounded(above, recipe, recipe.vector) @ wide).to(rows.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            product = _rounded(above.T, recipe, recipe.vector) @ _rounded(rows.T, recipe, recipe.vector).T
            of_weight = product.to(weight.dtype)
        return of_x, of_weight, None


def _rounded(values: torch.Tensor, recipe: Recipe, block: tuple[int, int]) -> torch.Tensor:
    """Rounds `values` [rows, cols] to blocks of fp8 and returns them in fp32."""
    codes, scales = quantise(values.detach().contiguous(), RULE[recipe.rule.upper()], block)
    return dequantise(codes, scales, block, torch.float32)
