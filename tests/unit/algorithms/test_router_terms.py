"""Formulas of the router's auxiliary terms against plain loops over tokens."""

from __future__ import annotations

import pytest
import torch

from slimx.algorithms.router_terms import balance_loss, normalized_scores, top_counts, updated_bias, z_loss

EXPERTS, TOPK = 6, 2
SEGMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
COUNTED = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0], dtype=torch.bool)
"""The third segment is nothing but padding."""


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(8, EXPERTS, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_scores_of_a_token_sum_to_one(logits, function):
    scores = normalized_scores(logits, function)
    assert torch.allclose(scores.sum(1), torch.ones(8))
    if function == "sigmoid":
        assert torch.allclose(scores[0, 0], logits[0, 0].sigmoid() / logits[0].sigmoid().sum())


def test_padding_is_in_no_term_and_gets_no_gradient(logits):
    scores = normalized_scores(logits, "softmax")
    counts = top_counts(scores.detach(), TOPK, COUNTED, SEGMENTS, 3)
    assert counts.sum(1).tolist() == [2 * TOPK, 3 * TOPK, 0]
    load, weight = counts / counts.sum(1, keepdim=True).clamp(min=1), torch.tensor([1 / 2, 1 / 3, 0.0])
    (balance_loss(scores, COUNTED, SEGMENTS, load, weight) + z_loss(logits, COUNTED)).backward()
    assert logits.grad[COUNTED].abs().sum(1).all() and not logits.grad[~COUNTED].any()


def test_the_balance_of_a_sequence_is_the_sum_of_load_times_mean_score(logits):
    scores = normalized_scores(logits, "softmax").detach()
    counts = top_counts(scores, TOPK, COUNTED, SEGMENTS, 3)
    load, weight = counts / counts.sum(1, keepdim=True).clamp(min=1), torch.tensor([1 / 2, 1 / 3, 0.0])
    expected = 0.0
    for segment, members in enumerate(([0, 1], [3, 4, 5])):
        for expert in range(EXPERTS):
            chosen = sum(expert in scores[token].topk(TOPK).indices for token in members)
            mean = sum(float(scores[token, expert]) for token in members) / len(members)
            expected += EXPERTS * chosen / (TOPK * len(members)) * mean
            assert counts[segment, expert] == chosen
    assert balance_loss(scores, COUNTED, SEGMENTS, load, weight) == pytest.approx(expected, rel=1e-6)


def test_even_load_has_balance_one():
    scores = torch.full((4, EXPERTS), 1 / EXPERTS)
    load = torch.full((1, EXPERTS), 1 / EXPERTS)
    every = torch.ones(4, dtype=torch.bool)
    assert balance_loss(scores, every, torch.zeros(4, dtype=torch.long), load, torch.tensor([0.25])) == pytest.approx(1)


def test_z_loss_sums_squared_logsumexps(logits):
    expected = sum(logits[t].exp().sum().log().item() ** 2 for t in range(8) if COUNTED[t])
    assert z_loss(logits, COUNTED).item() == pytest.approx(expected, rel=1e-6)


def test_biases_of_overloaded_experts_fall_and_of_underloaded_ones_rise():
    bias = torch.tensor([0.5, 0.5, 0.5, -0.25])
    load = torch.tensor([9, 3, 6, 6], dtype=torch.float64)
    assert updated_bias(bias, load, 0.001).tolist() == pytest.approx([0.499, 0.501, 0.5, -0.25])
