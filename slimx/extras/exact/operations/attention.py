"""Causal attention of exact mode over packed sequences, and over keys and values gathered from a KV cache."""

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
    """Computes causal attention within each packed sequence, [T, heads, dv] in the dtype of `query`. Each query reads
    its keys in order of position.

    `query` [T, heads, d], `key` [T, groups, d], `value` [T, groups, dv]; `cu_seqlens` [sequences + 1]: bounds of the
    sequences, from 0 to T. `scale`: factor by which scores are multiplied. `rows` [R]: under context parallelism, the
    positions of this rank's queries among the T packed tokens (the same fraction of every sequence); `query` is then
    [R, heads, d], and the result [R, heads, dv]. `window`: number of tokens to which a token attends, including itself;
    None: all before it. `sinks` [heads]: score of each head's attention sink, which precedes the keys and has no value.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()

    def exact(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        sizes = torch.tensor(lengths, dtype=torch.int64, device=query.device)
        position = torch.arange(int(sizes.sum()), device=query.device)
        first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # first row of the sequence that contains each row
        if window is not None:
            first = torch.maximum(first, position - (window - 1))
        last = position if rows is None else rows
        begin = first[last]
        return gathered_attention(query, key, value, position.int(), begin, last - begin + 1, scale, sinks=sinks)

    def plain(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes the same attention as the forward function `exact`, but with torch's ordinary kernels in fp32; the
        backward pass uses the gradient of this function."""
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
    """Computes attention [R, heads, dv] of each row r of `query` [R, heads, d] over the cache slots index[begin[r] :
    begin[r] + length[r]], in that order, without gradient.

    `key` [slots, groups, d], `value` [slots, groups, dv]; `index`: slots, int32 of any shape, read as if flattened (an
    engine's table of slots per request); `begin`, `length` [R]. A row has the same bits as in `attention` with the same
    keys, whether it is decoded, prefilled or computed after a cached prefix. For a sliding window, `begin` is the
    window's first key.
    """
    read = Gathered(*(t.contiguous() for t in (key, value, index, begin.long(), length.long())))
    return forward_on(query.device).attend(query.contiguous(), read, scale, sinks)
