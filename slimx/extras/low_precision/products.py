"""The three matrix products of a linear layer in fp8 (output, input gradient, weight gradient), with operands rounded
as publications round weights.

Operands are rounded as in Transformer Engine's recipes `Float8BlockScaling` (with fp32 scales) and `MXFP8BlockScaling`:
in blocks along the summed dimension, and always from the unrounded tensor. A tensor used in two products is therefore
rounded twice, once along its rows and once along its columns, except for weights in square blocks. Tensor cores
multiply codes and apply scales to the sum of each block. Here, code times scale is one fp32 number and sums are fp32,
so results agree with theirs up to fp32 rounding.
"""

from __future__ import annotations

from typing import Any

import torch

from slimx.extras.low_precision.blocks import dequantize, quantize
from slimx.extras.low_precision.recipes import Recipe
from slimx.reshard.kernels.record import RULE


def linear(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Returns x [..., in] times the transpose of weight [out, in]. The result is [..., out], in x's dtype. The product
    and both gradients are computed in fp8 by `recipe`."""
    return _Fp8Linear.apply(x, weight, recipe)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.recipe = recipe
        ctx.shape = x.shape
        out = _rounded(rows, recipe, recipe.vector) @ _rounded(weight, recipe, recipe.weight).T
        return out.to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        rows, weight = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        above = gradient.reshape(-1, gradient.shape[-1])
        x_gradient = None
        weight_gradient = None
        if ctx.needs_input_grad[0]:
            if recipe.weight[0] == recipe.weight[1]:
                wide = _rounded(weight, recipe, recipe.weight)
            else:
                wide = _rounded(weight.T, recipe, recipe.weight).T
            x_gradient = (_rounded(above, recipe, recipe.vector) @ wide).to(rows.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            product = _rounded(above.T, recipe, recipe.vector) @ _rounded(rows.T, recipe, recipe.vector).T
            weight_gradient = product.to(weight.dtype)
        return x_gradient, weight_gradient, None


def _rounded(values: torch.Tensor, recipe: Recipe, block: tuple[int, int]) -> torch.Tensor:
    """Returns in fp32 the `values` [rows, cols] rounded to fp8, with one scale per block. `block`: rows and columns of
    a block."""
    codes, scales = quantize(values.detach().contiguous(), RULE[recipe.rule.upper()], block)
    return dequantize(codes, scales, block, torch.float32)
