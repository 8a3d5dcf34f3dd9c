"""Attention over packed sequences is attention over each of them alone, whatever their lengths."""

from __future__ import annotations

import pytest
import torch

from slimx.numerics.attention import packed_attention

SCALE = 0.3


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One sequence by the formula: query [n, heads, d], key and value [n, groups, d]; returns [n, heads * dv]."""
    n, repeat = len(query), query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


@pytest.mark.parametrize("lengths", [[7], [5, 8, 6], [1, 40, 3, 2, 33, 9, 1], [64, 1, 64, 2]])
def test_output_and_gradients_are_those_of_each_sequence_alone(lengths):
    torch.manual_seed(0)
    shapes = (4, 8), (2, 8), (2, 6)
    inputs = [torch.randn(sum(lengths), *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    upstream = torch.randn(sum(lengths), 24, dtype=torch.float64)
    found = packed_attention(*inputs, lengths, SCALE)
    wanted = torch.cat([alone(*parts) for parts in zip(*(x.split(lengths) for x in inputs), strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(out, inputs, upstream) for out in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
