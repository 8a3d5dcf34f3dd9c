"""Causal attention over packed sequences."""

import torch
import torch.nn.functional as F


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """Each sequence attends to itself, causally.

    query [T, heads, d], key [T, groups, d], value [T, groups, dv], T = sum(lengths); returns [T, heads * dv].
    Sequences of similar length (the same power of two) are computed together as a padded batch: one batch of all would
    cost the longest sequence's square times their number.
    """
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        groups.setdefault((length - 1).bit_length(), []).append(number)
    if len(groups) == 1:
        return _padded_attention(query, key, value, lengths, scale)
    places, parts = [], []
    sequences = torch.arange(sum(lengths), device=query.device).split(lengths)
    for members in groups.values():
        place = torch.cat([sequences[number] for number in members])
        inside = [lengths[number] for number in members]
        parts.append(_padded_attention(query[place], key[place], value[place], inside, scale))
        places.append(place)
    return torch.cat(parts)[torch.cat(places).argsort()]


def _padded_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """`packed_attention` with all sequences side by side in a padded batch: padding stands after a sequence's tokens,
    so that no token of a causal row can see it."""
    grid = _Grid(lengths, query.device)
    out = F.scaled_dot_product_attention(
        *(grid.lay(x).transpose(1, 2) for x in (query, key, value)), is_causal=True, scale=scale, enable_gqa=True
    )
    return grid.collect(out.transpose(1, 2).flatten(2))


def partial_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], rows: torch.Tensor, scale: float
) -> torch.Tensor:
    """`packed_attention` of some tokens only.

    query [R, heads, d] stands at positions `rows` [R] of the pack, which hold the same share of every sequence; keys
    and values are those of all T tokens. Returns [R, heads * dv].
    """
    share = sum(lengths) // len(rows)
    queries, keys = _Grid([n // share for n in lengths], query.device), _Grid(lengths, query.device)
    starts = torch.tensor([0, *lengths[:-1]], device=query.device).cumsum(0)
    counts = torch.tensor(lengths, device=query.device) // share
    inside = queries.lay(rows - starts.repeat_interleave(counts))  # position in its own sequence; 0 in the padding
    seen = inside[:, :, None] >= torch.arange(max(lengths), device=query.device)
    out = F.scaled_dot_product_attention(
        queries.lay(query).transpose(1, 2),
        keys.lay(key).transpose(1, 2),
        keys.lay(value).transpose(1, 2),
        attn_mask=seen[:, None],
        scale=scale,
        enable_gqa=True,
    )
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
