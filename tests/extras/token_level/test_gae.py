"""Advantages of a critic are the published recursion, token by token, whatever lies between the trained tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from slimx.extras.token_level.token_rewards import explained_variance, gae, token_rewards, whiten
from slimx.extras.token_level.value_loss import ValueInputs, value_loss
from tests.unit.algorithms.naive_gae import naive


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rewards, values and a mask with holes [6, 23] in fp64; one row trains nothing, one everything."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(6, 23, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(6, 23, generator=g) < 0.5
    mask[1], mask[4] = False, True
    return rewards, values, mask


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_advantages_and_returns_are_the_recursion_over_trained_tokens(gamma, lam):
    rewards, values, mask = batch(3)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(len(mask)):
        expected = naive(rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), gamma, lam)
        assert advantages[row].tolist() == pytest.approx(expected[0], abs=1e-12)
        assert returns[row].tolist() == pytest.approx(expected[1], abs=1e-12)


def test_values_outside_trained_tokens_change_nothing_not_even_nan():
    rewards, values, mask = batch(4)
    expected = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    spoiled = [torch.where(mask, x, math.nan) for x in (rewards, values)]
    for found, reference in zip(gae(*spoiled, mask, gamma=0.9, lam=0.8), expected, strict=True):
        assert torch.equal(found, reference)


def test_a_batch_by_hand_with_a_tools_answer_between_two_turns():
    # gamma 0.5, lam 0.5; the third position is a tool's. delta: 0.5*2-1 = 0, 0.5*4-2 = 0, 3-4 = -1.
    mask = torch.tensor([[True, True, False, True, False]])
    values = torch.tensor([[1.0, 2.0, 9.0, 4.0, 9.0]])
    rewards = token_rewards(torch.tensor([3.0]), mask)
    assert rewards.tolist() == [[0, 0, 0, 3, 0]]
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-0.0625, -0.25, 0, -1, 0]]
    assert returns.tolist() == [[0.9375, 1.75, 0, 3, 0]]


def test_the_reward_is_paid_at_the_last_trained_token_kl_at_all():
    mask = torch.tensor([[False, True, True, False], [False, False, False, False], [True, False, False, True]])
    kl = torch.tensor([[9.0, 0.5, -1.0, 9.0], [9.0] * 4, [2.0, math.inf, math.nan, 0.0]])
    rewards = token_rewards(torch.tensor([1.0, 5.0, -1.0]), mask, kl=kl, kl_coef=0.1)
    expected = [[0, -0.05, 1.1, 0], [0] * 4, [-0.2, 0, 0, -1]]
    assert torch.allclose(rewards, torch.tensor(expected))


def test_whitened_advantages_have_mean_0_and_deviation_1():
    values, _, mask = batch(5)
    white = whiten(values, mask)
    assert white[~mask].eq(0).all()
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert white[mask].std(correction=0).item() == pytest.approx(1, abs=1e-6)
    # Order and distances are kept: one shift and one scale for all.
    slope = (white[mask] - white[mask][0]) / (values[mask] - values[mask][0])
    assert torch.allclose(slope[1:], slope[1])


def test_explained_variance_of_a_perfect_a_constant_and_a_wrong_critic():
    returns, _, mask = batch(6)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full_like(returns, 7.0), returns, mask) == pytest.approx(0, abs=1e-12)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert math.isnan(explained_variance(returns, torch.ones_like(returns), mask))


# The critic's loss ----------------------------------------------------------------------------------------------------


def inputs(seed: int, n: int = 50) -> ValueInputs:
    """Returns float64 inputs: half the values further than 0.2 from the old ones, a third of the tokens untrained."""
    g = torch.Generator().manual_seed(seed)
    old, returns = (torch.randn(n, generator=g, dtype=torch.float64) for _ in range(2))
    values = old + 0.3 * torch.randn(n, generator=g, dtype=torch.float64)
    weight = torch.rand(n, generator=g, dtype=torch.float64) * (torch.rand(n, generator=g) > 0.3)
    return ValueInputs(
        predicted=values.requires_grad_(),
        weight=weight / weight.sum(),
        values=old,
        returns=returns,
        advantages=returns - old,
        rollout_logprobs=-weight,
    )


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_value_loss_and_its_gradient_are_those_of_the_published_formula(clip):
    found = inputs(1)
    total, metrics = value_loss(found, clip=clip)
    total.backward()
    gradient, loss, clipped = [], 0.0, 0.0
    for w, v, o, r in zip(
        *(x.tolist() for x in (found.weight, found.predicted, found.values, found.returns)), strict=True
    ):
        edge = min(max(v, o - clip), o + clip) if clip else v
        beyond = (edge - r) ** 2 > (v - r) ** 2
        loss += w * 0.5 * max((v - r) ** 2, (edge - r) ** 2)
        clipped += w * beyond
        # At the edge the loss does not depend on v.
        gradient.append(0.0 if beyond else w * (v - r))
    assert total.item() == pytest.approx(loss, abs=1e-12)
    assert found.predicted.grad.tolist() == pytest.approx(gradient, abs=1e-12)
    assert metrics["value/loss"].item() == pytest.approx(loss, abs=1e-12)
    assert metrics["value/clip_fraction"].item() == pytest.approx(clipped, abs=1e-12)
    assert (clipped > 0) == (clip > 0)


def test_tokens_without_weight_may_hold_anything():
    found = inputs(2)
    idle = found.weight == 0
    spoiled = [torch.where(idle, math.nan, x.detach()).requires_grad_() for x in (found.predicted, found.values)]
    returns = torch.where(idle, math.inf, found.returns)
    other = replace(found, predicted=spoiled[0], values=spoiled[1], returns=returns)
    total, metrics = value_loss(other, clip=0.2)
    total.backward()
    expected, reported = value_loss(found, clip=0.2)
    assert total.item() == expected.item()
    assert all(metrics[name].item() == reported[name].item() for name in reported)
    assert other.predicted.grad[idle].eq(0).all()
