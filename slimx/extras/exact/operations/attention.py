"""Causal attention of exact mode: packed sequences, and rows that read gathered keys."""

from typing import Any

import torch

from slimx.extras.exact.operations.forward import forward_on
from slimx.extras.exact.operations.forward.reference import Gathered
from slimx.numerics.attention import packed_attention, partial_attention


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    *,
    rows: torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each packed sequence attends to itself, causally: a row reads its keys in order of position.

    query [T, heads, d], key [T, groups, d], value [T, groups, dv], cu_seqlens [sequences + 1] from 0 to T; returns
    [T, heads, dv] of query's dtype. `rows` [R]: the queries are those of these places of the pack only, the same share
    of every sequence (context parallelism, keys and values of all T): query [R, heads, d] -> [R, heads, dv]. `window`:
    a token sees that many, itself included. `sinks` [heads]: one more score per head, without a value, comes first.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    return _Attention.apply(query, key, value, sinks, lengths, scale, rows, window)


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: torch.Tensor,
    begin: torch.Tensor,
    length: torch.Tensor,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row r of query [R, heads, d] reads the rows index[begin[r] : begin[r] + length[r]] of a cache, in that order.

    key [slots, groups, d], value [slots, groups, dv]; index: int32 of any shape, read flat (an engine's table of
    slots); begin, length [R]; returns [R, heads, dv]. Bits are those of `attention` for a row that sees the same keys,
    whether it is decoded, prefilled or behind a cached prefix. A window is a later `begin`. No gradient.
    """
    read = Gathered(*(t.contiguous() for t in (key, value, index, begin.long(), length.long())))
    return forward_on(query.device).attend(query.contiguous(), read, scale, sinks)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        lengths: list[int],
        scale: float,
        rows: torch.Tensor | None,
        window: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, *(t for t in (sinks, rows) if t is not None))
        ctx.has_sinks, ctx.has_rows = sinks is not None, rows is not None
        ctx.lengths, ctx.scale, ctx.window = lengths, scale, window
        sizes = torch.tensor(lengths, dtype=torch.int64, device=query.device)
        place = torch.arange(int(sizes.sum()), device=query.device)
        first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # where each row's sequence begins
        if window is not None:
            first = torch.maximum(first, place - (window - 1))
        at = place if rows is None else rows
        return gathered_attention(query, key, value, place.int(), first[at], at - first[at] + 1, scale, sinks=sinks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """The gradient of torch's attention, computed again in fp32."""
        query, key, value, *rest = (t.detach() for t in ctx.saved_tensors)
        sinks = rest.pop(0) if ctx.has_sinks else None
        inputs = [t.requires_grad_() for t in (query, key, value, *(() if sinks is None else (sinks,)))]
        with torch.enable_grad():
            wide = [t.float() for t in (query, key, value)]
            options = {"window": ctx.window, "sinks": None if sinks is None else sinks.float()}
            if ctx.has_rows:
                out = partial_attention(*wide, ctx.lengths, rest[0], ctx.scale, **options)
            else:
                out = packed_attention(*wide, ctx.lengths, ctx.scale, **options)
            out = out.view(gradient.shape).to(gradient.dtype)
        of_inputs = torch.autograd.grad(out, inputs, gradient)
        return *of_inputs[:3], of_inputs[3] if ctx.has_sinks else None, None, None, None, None
