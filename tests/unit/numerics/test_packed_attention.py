"""Attention over packed sequences is attention over each of them alone, whatever their lengths."""

from __future__ import annotations

import pytest
import torch

from slimx.layout.zigzag import zigzag
from slimx.numerics.attention import packed_attention, partial_attention

SCALE = 0.3


def alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence by the formula: query [n, heads, d], key and value [n, groups, d]; returns [n, heads * dv]."""
    n, repeat = len(query), query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    if window is not None:
        scores = scores.masked_fill(torch.ones(n, n).tril(-window).bool(), float("-inf"))
    shares = scores.exp()
    total = shares.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("hqk,khd->qhd", shares / total, value).flatten(1)


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


@pytest.mark.parametrize("window", [None, 1, 4, 64])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("lengths", [[7], [8, 40, 4, 32]])
def test_windows_and_sinks_are_those_of_the_formula_with_their_gradients(lengths, window, sunk):
    torch.manual_seed(0)
    shapes = (4, 8), (2, 8), (2, 6)
    inputs = [torch.randn(sum(lengths), *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if sunk else None
    upstream = torch.randn(sum(lengths), 24, dtype=torch.float64)
    found = packed_attention(*inputs, lengths, SCALE, window=window, sinks=sinks)
    sequences = zip(*(x.split(lengths) for x in inputs), strict=True)
    wanted = torch.cat([alone(*parts, window, sinks) for parts in sequences])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    leaves = [*inputs, *([] if sinks is None else [sinks])]
    gradients = [torch.autograd.grad(out, leaves, upstream, retain_graph=True) for out in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("window", [None, 5])
def test_a_context_parallel_rank_computes_its_rows_of_the_same(window):
    torch.manual_seed(0)
    lengths, size = [8, 24, 4], 2
    query, key, value = (torch.randn(sum(lengths), *shape, dtype=torch.float64) for shape in ((4, 8), (2, 8), (2, 6)))
    sinks = torch.randn(4, dtype=torch.float64)
    whole = packed_attention(query, key, value, lengths, SCALE, window=window, sinks=sinks)
    for rank in range(size):
        rows = torch.from_numpy(zigzag(lengths, size, rank))
        part = partial_attention(query[rows], key, value, lengths, rows, SCALE, window=window, sinks=sinks)
        torch.testing.assert_close(part, whole[rows], rtol=1e-12, atol=1e-12)
