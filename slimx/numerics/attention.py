"""Causal attention over packed sequences."""

import torch
import torch.nn.functional as F


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """Each sequence attends to itself, causally.

    query [T, heads, d], key [T, groups, d], value [T, groups, dv], T = sum(lengths); returns [T, heads * dv].
    Sequences are laid side by side in a padded batch: padding stands after a sequence's tokens, so that no token of a
    causal row can see it. The cost follows the longest sequence of the pack times their number.
    """
    batch, longest = len(lengths), max(lengths)
    if all(length == longest for length in lengths):
        rows = None
        q, k, v = (x.view(batch, longest, *x.shape[1:]) for x in (query, key, value))
    else:
        sizes = torch.tensor(lengths, device=query.device)
        rows = (torch.arange(longest, device=query.device) < sizes[:, None]).flatten().nonzero()[:, 0]
        q, k, v = (_scatter(x, rows, batch * longest).view(batch, longest, *x.shape[1:]) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
    )
    out = out.transpose(1, 2).reshape(batch * longest, -1)
    return out if rows is None else out[rows]


def _scatter(x: torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
    return x.new_zeros(total, *x.shape[1:]).index_copy(0, rows, x)
