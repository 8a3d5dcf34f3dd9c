"""Causal attention over packed sequences, computed with torch's scaled_dot_product_attention."""

import torch
import torch.nn.functional as F


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scale: float,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes causal attention within each of the packed sequences.

    `query` [T, heads, d], `key` [T, groups, d], `value` [T, groups, dv], with T = sum(lengths); returns [T, heads *
    dv]. `scale`: factor applied to the products of queries and keys. `window`: number of tokens that a token attends
    to, including itself; None for itself and all earlier tokens. `sinks` [heads]: for each head, the logit of an
    additional key that takes part in the softmax and has no value (gpt-oss, arXiv 2508.10925; Xiao et al., arXiv
    2309.17453).

    Sequences whose lengths round up to the same power of two are computed together as a padded batch. A single batch of
    all sequences would cost the square of the longest length times the number of sequences."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault((length - 1).bit_length(), []).append(index)
    if len(groups) == 1:
        return _padded_attention(query, key, value, lengths, scale, window, sinks)
    positions = []
    parts = []
    sequences = torch.arange(sum(lengths), device=query.device).split(lengths)
    for members in groups.values():
        part = torch.cat([sequences[index] for index in members])
        sizes = [lengths[index] for index in members]
        parts.append(_padded_attention(query[part], key[part], value[part], sizes, scale, window, sinks))
        positions.append(part)
    return torch.cat(parts)[torch.cat(positions).argsort()]


def _padded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Computes `packed_attention` with all sequences in one padded batch. Padding follows the tokens of a sequence, so
    under the causal mask no token attends to padding."""
    grid = _Grid(lengths, query.device)
    query, key, value = (grid.pad(x).transpose(1, 2) for x in (query, key, value))
    if window is None and sinks is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    else:
        positions = torch.arange(max(lengths), device=query.device)
        mask = _visible(positions[None], max(lengths), window)
        out = _masked_attention(query, key, value, mask, scale, sinks)
    return grid.pack(out.transpose(1, 2).flatten(2))


def _visible(positions: torch.Tensor, keys: int, window: int | None) -> torch.Tensor:
    """Returns a mask that is True where a query may attend to a key: bool [..., Q, keys] for queries at `positions`
    [..., Q] of a sequence and its first `keys` tokens."""
    distance = positions[..., None] - torch.arange(keys, device=positions.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Computes attention of `query` [n, heads, Q, d] to `key` [n, groups, K, d] and `value` [n, groups, K, dv], where
    `mask`, bool [n or 1, Q, K], is True. `sinks`: see `packed_attention`. Returns [n, heads, Q, dv].

    A sink is appended as a key that is 1 in an appended dimension, in which the queries have the logit of their head.
    The kernel thus includes the sink in the softmax, and the sink's gradient results from the gradient of the queries.

    torch's CUDA kernels that accept a mask without storing the scores need head sizes divisible by 8, and not all of
    them support grouped heads (`sdp_utils.cpp`). Sizes are therefore padded and groups repeated; otherwise, torch would
    store the scores of all pairs in fp32."""
    width = value.shape[-1]
    if sinks is not None:
        logit = (sinks / scale).to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
        query = torch.cat([query, logit], dim=-1)
        key = F.pad(key, (0, 1, 0, 1))
        value = F.pad(value, (0, 0, 0, 1))
        key[..., -1, -1] = 1
        mask = F.pad(mask, (0, 1), value=True)
    query, key, value = (_padded_size(x) for x in (query, key, value))
    heads = query.shape[1]
    key = _repeated(key, heads)
    value = _repeated(value, heads)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], scale=scale)
    return out[..., :width]


def _padded_size(x: torch.Tensor) -> torch.Tensor:
    """Pads the last dimension of `x` with zeros to a multiple of 8, as some of torch's attention kernels require."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats the key or value of each group for all heads of the group: [n, groups, K, d] -> [n, heads, K, d]."""
    repeat = heads // x.shape[1]
    if repeat == 1:
        return x
    return x[:, :, None].expand(-1, -1, repeat, -1, -1).flatten(1, 2)


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    rows: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `packed_attention` for the queries of only some tokens, such as those of a context-parallel rank.

    `query` [R, heads, d]: queries at the positions `rows` [R] of the packed tokens; `rows` must contain the same
    fraction of the positions of every sequence. `key` and `value`: keys and values of all T tokens. Returns [R, heads *
    dv]."""
    fraction = sum(lengths) // len(rows)
    queries = _Grid([length // fraction for length in lengths], query.device)
    keys = _Grid(lengths, query.device)
    starts = torch.tensor([0, *lengths[:-1]], device=query.device).cumsum(0)
    counts = torch.tensor(lengths, device=query.device) // fraction
    positions = queries.pad(rows - starts.repeat_interleave(counts))  # positions within the sequences; 0 for padding
    query = queries.pad(query).transpose(1, 2)
    key = keys.pad(key).transpose(1, 2)
    value = keys.pad(value).transpose(1, 2)
    out = _masked_attention(query, key, value, _visible(positions, max(lengths), window), scale, sinks)
    return queries.pack(out.transpose(1, 2).flatten(2))


class _Grid:
    """Layout of packed sequences as the rows of a padded batch."""

    def __init__(self, lengths: list[int], device: torch.device):
        self.shape = (len(lengths), max(lengths))
        self.positions: torch.Tensor | None = None
        if sum(lengths) != self.shape[0] * self.shape[1]:
            sizes = torch.tensor(lengths, device=device)
            self.positions = (torch.arange(self.shape[1], device=device) < sizes[:, None]).flatten().nonzero()[:, 0]

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Converts packed values to a padded batch, with zeros as padding: [T, ...] -> [sequences, longest, ...]."""
        if self.positions is not None:
            padded = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
            x = padded.index_copy(0, self.positions, x)
        return x.view(*self.shape, *x.shape[1:])

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Converts a padded batch to packed values: [sequences, longest, n] -> [T, n]."""
        x = x.flatten(0, 1)
        return x if self.positions is None else x[self.positions]
