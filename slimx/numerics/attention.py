"""Causal attention over packed sequences."""

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
    """Each sequence attends to itself, causally.

    query [T, heads, d], key [T, groups, d], value [T, groups, dv], T = sum(lengths); returns [T, heads * dv].
    `window`: a token sees that many, itself included; None: all before it. `sinks` [heads]: logits of one more key per
    head, which takes its share of the softmax and has no value (gpt-oss, arXiv 2508.10925; Xiao et al., 2309.17453).
    Sequences of similar length (the same power of two) are computed together as a padded batch: one batch of all would
    cost the longest sequence's square times their number.
    """
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        groups.setdefault((length - 1).bit_length(), []).append(number)
    if len(groups) == 1:
        return _padded_attention(query, key, value, lengths, scale, window, sinks)
    places, parts = [], []
    sequences = torch.arange(sum(lengths), device=query.device).split(lengths)
    for members in groups.values():
        place = torch.cat([sequences[number] for number in members])
        inside = [lengths[number] for number in members]
        parts.append(_padded_attention(query[place], key[place], value[place], inside, scale, window, sinks))
        places.append(place)
    return torch.cat(parts)[torch.cat(places).argsort()]


def _padded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`packed_attention` with all sequences side by side in a padded batch: padding stands after a sequence's tokens,
    so that no token of a causal row can see it."""
    grid = _Grid(lengths, query.device)
    query, key, value = (grid.lay(x).transpose(1, 2) for x in (query, key, value))
    if window is None and sinks is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    else:
        place = torch.arange(max(lengths), device=query.device)
        out = _masked_attention(query, key, value, _seen(place[None], max(lengths), window), scale, sinks)
    return grid.collect(out.transpose(1, 2).flatten(2))


def _seen(place: torch.Tensor, keys: int, window: int | None) -> torch.Tensor:
    """Mark those of a sequence's first `keys` tokens that each query sees: `place` [..., Q] -> bool [..., Q, keys]."""
    before = place[..., None] - torch.arange(keys, device=place.device)
    return before >= 0 if window is None else (before >= 0) & (before < window)


def _masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [n, heads, Q, d], key [n, groups, K, d], value [n, groups, K, dv], seen [n or 1, Q, K] bool, sinks [heads];
    returns [n, heads, Q, dv].

    A sink is one more key that is nonzero in one more dimension, where each head's queries hold its logit. So the
    kernels' own softmax sums it, and its gradient comes through the queries.

    torch's CUDA kernels that take a mask and keep no scores want sizes that 8 divides, and not all of them know grouped
    heads (`sdp_utils.cpp`): otherwise scores of every pair remain, in fp32.
    """
    width = value.shape[-1]
    if sinks is not None:
        logit = (sinks / scale).to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
        query = torch.cat([query, logit], dim=-1)
        key, value = F.pad(key, (0, 1, 0, 1)), F.pad(value, (0, 0, 0, 1))
        key[..., -1, -1] = 1
        seen = F.pad(seen, (0, 1), value=True)
    query, key, value = (_padded_size(x) for x in (query, key, value))
    key, value = (_of_heads(x, query.shape[1]) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None], scale=scale)
    return out[..., :width]


def _padded_size(x: torch.Tensor) -> torch.Tensor:
    """Zeros behind the last dimension up to a multiple of 8."""
    return F.pad(x, (0, more)) if (more := -x.shape[-1] % 8) else x


def _of_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[n, groups, K, d] -> [n, heads, K, d]: the group of each head."""
    if (repeat := heads // x.shape[1]) == 1:
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
    """Causal attention over packed sequences as `packed_attention`, for the queries of some tokens only.

    query [R, heads, d] stands at positions `rows` [R] of the pack, which hold the same share of every sequence; keys
    and values are those of all T tokens. Returns [R, heads * dv].
    """
    share = sum(lengths) // len(rows)
    queries, keys = _Grid([n // share for n in lengths], query.device), _Grid(lengths, query.device)
    starts = torch.tensor([0, *lengths[:-1]], device=query.device).cumsum(0)
    counts = torch.tensor(lengths, device=query.device) // share
    inside = queries.lay(rows - starts.repeat_interleave(counts))  # position in its own sequence; 0 in the padding
    query, key, value = (grid.lay(x).transpose(1, 2) for grid, x in ((queries, query), (keys, key), (keys, value)))
    out = _masked_attention(query, key, value, _seen(inside, max(lengths), window), scale, sinks)
    return queries.collect(out.transpose(1, 2).flatten(2))


class _Grid:
    """Packed sequences as the rows of a padded batch."""

    def __init__(self, lengths: list[int], device: torch.device):
        self.shape = len(lengths), max(lengths)
        self.places: torch.Tensor | None = None
        if sum(lengths) != self.shape[0] * self.shape[1]:
            sizes = torch.tensor(lengths, device=device)
            self.places = (torch.arange(self.shape[1], device=device) < sizes[:, None]).flatten().nonzero()[:, 0]

    def lay(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [sequences, longest, ...], zeros in the padding."""
        if self.places is not None:
            whole = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
            x = whole.index_copy(0, self.places, x)
        return x.view(*self.shape, *x.shape[1:])

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        """[sequences, longest, n] -> [T, n]."""
        x = x.flatten(0, 1)
        return x if self.places is None else x[self.places]
