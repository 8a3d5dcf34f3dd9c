"""Attention over packed sequences is attention over each of them alone, whatever their lengths."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slimx.data.packing import zigzag
from slimx.numerics.attention import packed_attention, partial_attention

SCALE = 0.3


def alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes one sequence by the formula: query [n, heads, d], key, value [n, groups, d]; returns [n, heads * dv]."""
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
    expected = torch.cat([alone(*parts) for parts in zip(*(x.split(lengths) for x in inputs), strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(out, inputs, upstream) for out in (found, expected)]
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
    expected = torch.cat([alone(*parts, window, sinks) for parts in sequences])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    leaves = [*inputs, *([] if sinks is None else [sinks])]
    gradients = [torch.autograd.grad(out, leaves, upstream, retain_graph=True) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("size", "wide"), [(64, 64), (8, 6), (13, 5)])
@pytest.mark.parametrize(("window", "sunk"), [(None, True), (4, True), (4, False)])
def test_beside_a_mask_torch_gets_a_shape_that_its_fused_kernel_takes(monkeypatch, size, wide, window, sunk):
    """The conditions of `check_head_dim_size_mem_efficient` and `check_batch_size_and_num_heads_dense` of torch's
    sdp_utils.cpp: sizes that 8 divides, as many keys as heads; without them scores of every pair are kept in fp32."""
    seen, attend = [], F.scaled_dot_product_attention

    def watched(query, key, value, **options):
        seen.append((query.shape, key.shape, value.shape, options))
        return attend(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    lengths, heads = [8, 6, 24], 4
    query, key, value = (torch.randn(sum(lengths), n, d) for n, d in ((heads, size), (2, size), (2, wide)))
    sinks = torch.randn(heads) if sunk else None
    assert packed_attention(query, key, value, lengths, SCALE, window=window, sinks=sinks).shape[1] == heads * wide
    rows = torch.from_numpy(zigzag(lengths := [8, 24, 4], 2, 0))
    more = [torch.randn(sum(lengths), n, d) for n, d in ((2, size), (2, wide))]
    partial_attention(torch.randn(len(rows), heads, size), *more, lengths, rows, SCALE, window=window, sinks=sinks)
    assert len(seen) >= 2
    for *shapes, options in seen:
        assert options["attn_mask"] is not None and not options.get("enable_gqa")
        assert all(shape[1] == heads and shape[-1] % 8 == 0 for shape in shapes)


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
