"""Context parallelism: the ranks' parts of a pack are the whole, and attention over a part is a part of attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slimx.data.packing import zigzag
from slimx.layout.megatron import nearly_equal
from slimx.numerics.attention import packed_attention, partial_attention
from tests.refusals import numbers, refused

LENGTHS = [8, 24, 16, 8]


def plain_attention(query, key, value, lengths, scale):
    """Computes attention for one sequence after the other, with scores and softmax written out."""
    out = []
    groups = query.shape[1] // key.shape[1]
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * scale
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(groups, 1)).flatten(1))
    return torch.cat(out)


def inputs(tokens: int):
    torch.manual_seed(0)
    shapes = ((tokens, 4, 16), (tokens, 2, 16), (tokens, 2, 12))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("lengths", [LENGTHS, [16, 16], [5, 1, 9]])
def test_packed_attention_is_that_of_each_sequence_alone(lengths):
    query, key, value = inputs(sum(lengths))
    found, expected = (f(query, key, value, lengths, 0.3) for f in (packed_attention, plain_attention))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_parts_of_attention_and_of_its_gradients_are_the_whole(size):
    query, key, value = inputs(sum(LENGTHS))
    whole = plain_attention(query, key, value, LENGTHS, 0.3)
    weight = torch.randn(whole.shape, dtype=torch.float64)
    expected = torch.autograd.grad((whole * weight).sum(), (query, key, value))
    total = 0.0
    for rank in range(size):
        rows = torch.from_numpy(zigzag(LENGTHS, size, rank))
        part = partial_attention(query[rows], key, value, LENGTHS, rows, 0.3)
        torch.testing.assert_close(part, whole[rows])
        total = total + (part * weight[rows]).sum()
    for found, gradient in zip(torch.autograd.grad(total, (query, key, value)), expected, strict=True):
        torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_token_has_one_rank_and_all_ranks_the_same_causal_work(size):
    parts = [zigzag(LENGTHS, size, rank) for rank in range(size)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(sum(LENGTHS)))
    starts = np.repeat(np.cumsum([0, *LENGTHS[:-1]]), LENGTHS)
    assert len({int((part - starts[part]).sum()) for part in parts}) == 1


def test_a_sequence_that_does_not_divide_is_refused_with_its_length():
    with refused("layout.zigzag", about="trainer.context") as caught:
        zigzag([16, 12], 4, 0)
    assert numbers(caught.value) == [12, 8, 4, 8], "tokens, chunks, ranks and the multiple"


@pytest.mark.parametrize(("layers", "stages", "split"), [(61, 4, [15, 16, 15, 15]), (5, 1, [5]), (3, 4, [1, 1, 1, 0])])
def test_the_split_that_is_offered_spares_the_ends(layers, stages, split):
    assert nearly_equal(layers, stages) == split
    assert sum(split) == layers
