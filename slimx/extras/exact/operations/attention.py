"""Causal attention of exact mode over packed sequences or gathered keys."""

import torch

from slimx.extras.exact.operations.forward import ExactForward, forward_on
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
    """Computes causal attention within each packed sequence; a row reads its keys in order of position.

    query [T, heads, d], key [T, groups, d], value [T, groups, dv], cu_seqlens [sequences + 1] from 0 to T; returns [T,
    heads, dv] of query's dtype. `rows` [R]: positions in the pack of the queries, if only some are computed (context
    parallelism; the same fraction of every sequence, keys and values of all T): query [R, heads, d] -> [R, heads, dv].
    `window`: number of tokens that a token attends to, including itself. `sinks` [heads]: an additional first score per
    head, without a value.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()

    def exact(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        sizes = torch.tensor(lengths, dtype=torch.int64, device=query.device)
        position = torch.arange(int(sizes.sum()), device=query.device)
        first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # first row of each row's sequence
        if window is not None:
            first = torch.maximum(first, position - (window - 1))
        last = position if rows is None else rows
        begin = first[last]
        return gathered_attention(query, key, value, position.int(), begin, last - begin + 1, scale, sinks=sinks)

    def plain(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes the same with torch's attention in fp32."""
        query_fp32 = query.float()
        key_fp32 = key.float()
        value_fp32 = value.float()
        sinks_fp32 = None if sinks is None else sinks.float()
        if rows is None:
            out = packed_attention(query_fp32, key_fp32, value_fp32, lengths, scale, window=window, sinks=sinks_fp32)
        else:
            out = partial_attention(
                query_fp32, key_fp32, value_fp32, lengths, rows, scale, window=window, sinks=sinks_fp32
            )
        return out.view(*query.shape[:2], value.shape[2])

    if sinks is None:
        return ExactForward.apply(exact, plain, query, key, value)
    return ExactForward.apply(exact, plain, query, key, value, sinks)


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
    """Computes attention of each row r of query [R, heads, d] over cache rows index[begin[r] : begin[r] + length[r]],
    in order.

    key [slots, groups, d], value [slots, groups, dv]; index: int32 of any shape, read flat (an engine's table of
    slots); begin, length [R]; returns [R, heads, dv]. The bits equal those of `attention` for a row with the same keys,
    decoded, prefilled or after a cached prefix. A window is a later `begin`. No gradient.
    """
    read = Gathered(*(t.contiguous() for t in (key, value, index, begin.long(), length.long())))
    return forward_on(query.device).attend(query.contiguous(), read, scale, sinks)
