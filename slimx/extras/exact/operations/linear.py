"""Linear layers of exact mode, single or one per expert, with complete sums or a tensor-parallel rank's parts of
them."""

from collections.abc import Sequence
from typing import Any

import torch

from slimx.errors import SlimxError
from slimx.extras.exact.operations.forward import forward_on
from slimx.extras.exact.operations.forward.elementary import tree
from slimx.extras.exact.operations.sizes import check_leaves


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    leaves: int = 1,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes a linear layer [..., N], accumulated in fp32 and rounded once to `dtype` (None: x's dtype).

    `x` [..., K], `weight` [N, K], `bias` [N]. `leaves`: number of equal parts of K whose sums are added in a binary
    tree; each tensor-parallel rank owns complete parts. The bias is added in fp32 before rounding. If x and weight have
    different dtypes, both are converted to fp32.
    """
    check_leaves(leaves, x.shape[-1])
    out_dtype = dtype or x.dtype
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    out = grouped_linear(rows, [weight], [len(rows)], leaves, dtype=out_dtype if bias is None else torch.float32)
    if bias is not None:
        out = (out + bias.float()).to(out_dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_partial(x: torch.Tensor, weight: torch.Tensor, leaves: int = 1) -> torch.Tensor:
    """Computes one rank's part of a row-parallel linear layer's sum, [..., N] in fp32, not rounded. `x` [..., K /
    ranks], `weight` [N, K / ranks].

    `leaves`: number of leaves on this rank, which is the layer's number of leaves divided by the number of ranks.
    `combine_leaves` adds the results of all ranks.
    """
    return linear(x, weight, leaves, dtype=torch.float32)


def combine_leaves(parts: Sequence[torch.Tensor] | torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Adds the partial sums of all ranks, in rank order, as the upper levels of the binary tree, and rounds to `dtype`
    (None: fp32).

    `parts`: 2^n fp32 tensors of one shape, or one tensor that stacks them along its first dimension.
    """
    ordered = list(parts)
    check_leaves(len(ordered))
    if any(part.dtype != torch.float32 for part in ordered):
        raise SlimxError(
            f"partial sums have dtype {', '.join(sorted({str(part.dtype) for part in ordered}))}, but must have dtype "
            "torch.float32; pass the fp32 results of linear_partial unchanged",
            code="exact.dtype",
            about=str(ordered[0].dtype),
        )
    total = tree(ordered)
    return total if dtype is None else total.to(dtype)


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor] | torch.Tensor,
    counts: Sequence[int],
    leaves: int = 1,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes one linear layer per expert, [T, N].

    `x` [T, K], sorted by expert; `counts`: number of rows of each expert; `weights` [experts, N, K], or a list of [N,
    K]. Each row's result equals that of `linear`. With `dtype=torch.float32`, the result is a rank's unrounded part, as
    in `linear_partial`.
    """
    check_leaves(leaves, x.shape[1])
    if len(weights) != len(counts) or sum(counts) != len(x):
        raise SlimxError(
            f"x has {len(x)} rows for {len(weights)} experts, but counts has {len(counts)} entries with sum "
            f"{sum(counts)}; set counts to the number of rows of each expert, with sum {len(x)}",
            code="exact.counts",
            about="counts",
        )
    return _ExactLinear.apply(x, tuple(counts), leaves, dtype or x.dtype, *weights)


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, counts: tuple[int, ...], leaves: int, dtype: torch.dtype, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        matrices = weights
        if any(weight.dtype != x.dtype for weight in weights):
            x = x.float()
            matrices = tuple(weight.float() for weight in weights)
        return forward_on(x.device).linear(x, matrices, counts, leaves, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Computes the gradients with ordinary matrix products in x's dtype."""
        x, *weights = ctx.saved_tensors
        rows = gradient.to(x.dtype).split(ctx.counts)
        x_gradient = None
        weight_gradients: list[torch.Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            x_gradient = torch.cat([g @ weight.to(x.dtype) for g, weight in zip(rows, weights, strict=True)])
        for e, (g, part) in enumerate(zip(rows, x.split(ctx.counts), strict=True)):
            if ctx.needs_input_grad[4 + e]:
                weight_gradients[e] = (g.t() @ part).to(weights[e].dtype)
        return x_gradient, None, None, None, *weight_gradients
