"""Causal attention of exact mode: packed sequences, and rows that read gathered keys."""

import torch

from slimx.extras.exact.operations.forward import Computed, forward_on
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

    def exact(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        sizes = torch.tensor(lengths, dtype=torch.int64, device=query.device)
        place = torch.arange(int(sizes.sum()), device=query.device)
        first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # where each row's sequence begins
        if window is not None:
            first = torch.maximum(first, place - (window - 1))
        at = place if rows is None else rows
        return gathered_attention(query, key, value, place.int(), first[at], at - first[at] + 1, scale, sinks=sinks)

    def plain(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Torch's attention in fp32."""
        wide = [t.float() for t in (query, key, value)]
        options = {"window": window, "sinks": None if sinks is None else sinks.float()}
        if rows is None:
            out = packed_attention(*wide, lengths, scale, **options)
        else:
            out = partial_attention(*wide, lengths, rows, scale, **options)
        return out.view(*query.shape[:2], value.shape[2])

    return Computed.apply(exact, plain, query, key, value, *(() if sinks is None else (sinks,)))


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
