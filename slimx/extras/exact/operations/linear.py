"""Linear layers of exact mode, alone or one per expert, whole or of one rank's columns."""

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
    """Linear layer, accumulated in fp32 and rounded once to `dtype` (x's unless given).

    x [..., K], weight [N, K], bias [N] -> [..., N]. `leaves`: equal parts of K whose sums meet in a binary tree, so
    that tensor-parallel ranks can own whole parts. The bias is added in fp32, before the rounding. x and weight of
    different dtypes are computed as fp32.
    """
    check_leaves(leaves, x.shape[-1])
    wanted = dtype or x.dtype
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    out = grouped_linear(rows, [weight], [len(rows)], leaves, dtype=wanted if bias is None else torch.float32)
    if bias is not None:
        out = (out + bias.float()).to(wanted)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_partial(x: torch.Tensor, weight: torch.Tensor, leaves: int = 1) -> torch.Tensor:
    """One rank's share of a row-parallel linear: x [..., K / ranks], weight [N, K / ranks] -> [..., N] fp32, unrounded.

    `leaves`: this rank's own, the whole layer's divided by the ranks. `combine_leaves` makes the rest.
    """
    return linear(x, weight, leaves, dtype=torch.float32)


def combine_leaves(parts: Sequence[torch.Tensor] | torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The partial results of all ranks, in rank order, added as the upper levels of the tree: [...] of `dtype`.

    `parts`: 2^n fp32 tensors of one shape, or one tensor that has them along its first dimension.
    """
    ordered = list(parts)
    check_leaves(len(ordered))
    if any(part.dtype != torch.float32 for part in ordered):
        raise SlimxError(
            f"partial sums of {ordered[0].dtype} would be rounded twice: pass those of linear_partial",
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
    """One linear layer per expert.

    x [T, K], sorted by expert, counts[e] rows for expert e; weights [experts, N, K] or a list of [N, K] -> [T, N].
    Each row is what `linear` makes of it. `dtype=torch.float32` gives one rank's share (`linear_partial`).
    """
    check_leaves(leaves, x.shape[1])
    if len(weights) != len(counts) or sum(counts) != len(x):
        raise SlimxError(
            f"{len(x)} rows for {len(weights)} experts are counted as {sum(counts)} for {len(counts)}: pass one count "
            "for each expert",
            code="exact.counts",
            about="counts",
        )
    return _Linear.apply(x, tuple(counts), leaves, dtype or x.dtype, *weights)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, counts: tuple[int, ...], leaves: int, dtype: torch.dtype, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        if any(weight.dtype != x.dtype for weight in weights):
            x, weights = x.float(), tuple(weight.float() for weight in weights)
        return forward_on(x.device).linear(x, weights, counts, leaves, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Ordinary matrix products in x's dtype."""
        x, *weights = ctx.saved_tensors
        rows = gradient.to(x.dtype).split(ctx.counts)
        of_x, of_weights = None, [None] * len(weights)
        if ctx.needs_input_grad[0]:
            of_x = torch.cat([g @ weight.to(x.dtype) for g, weight in zip(rows, weights, strict=True)])
        for e, (g, part) in enumerate(zip(rows, x.split(ctx.counts), strict=True)):
            if ctx.needs_input_grad[4 + e]:
                of_weights[e] = (g.t() @ part).to(weights[e].dtype)
        return of_x, None, None, None, *of_weights
