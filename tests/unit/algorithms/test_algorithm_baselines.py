"""Baselines weighted by length, steps in which few groups have a gradient, and what a preset's loss is a mean of."""

from __future__ import annotations

import math

import pytest

from slimx.algorithms.advantages.estimate import all_advantages, group_advantages
from slimx.config.sections.algorithm import Algorithm
from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group, Prompt
from tests.unit.algorithms.advantage_stand import group, trajectory


def test_the_baseline_of_opo_is_weighted_by_length():
    """Rewards 1, 0, 0.5 of 3, 5 and 2 tokens: b = (3 x 1 + 5 x 0 + 2 x 0.5) / 10 = 0.4."""
    members = [trajectory("a", n, r, sampled=s) for n, (r, s) in enumerate([(1.0, 3), (0.0, 5), (0.5, 2)])]
    one = Group(id="a", prompt=Prompt(id="a", token_ids=[1]), trajectories=members)
    assert group_advantages(Algorithm(name="opo"), one) == pytest.approx([0.6, -0.4, 0.1])
    # Two trajectories of one rollout: 3 + 5 tokens with their mean reward 0.5, and b = (8 x 0.5 + 2 x 0.5) / 10.
    members[1] = trajectory("a", 0, 0.0, sampled=5, id="a/0b")
    assert group_advantages(Algorithm(name="opo"), one) == pytest.approx([0.0, 0.0, 0.0])
    members[2].reward = 2.0
    assert group_advantages(Algorithm(name="opo"), one) == pytest.approx([-0.3, -0.3, 1.2])
    # Tokens of a tool, or none at all, are no length of the policy's.
    members[2].loss_mask[:] = 0
    assert group_advantages(Algorithm(name="opo"), one) == pytest.approx([0.0, 0.0, 1.5])
    members[0].loss_mask[:] = members[1].loss_mask[:] = 0
    assert group_advantages(Algorithm(name="opo"), one) == pytest.approx([-0.75, -0.75, 0.75])
    assert group_advantages(Algorithm(name="opo"), group("b", [2.0])) == [0.0]


def test_gpg_makes_up_for_groups_without_a_gradient():
    """2504.02546: A = alpha (r - mean), alpha = B / (B - M) with M of the B rollouts in groups of equal rewards. Here
    3 of 8 rollouts have no gradient: a group of two, one of a single rollout."""
    groups = [group("a", [1.0, 0.0]), group("b", [1.0, 1.0]), group("c", [5.0]), group("d", [0.0, 0.0, 3.0])]
    alpha = 8 / (8 - 3)
    expected = [alpha * x for x in (0.5, -0.5, 0.0, 0.0, 0.0, -1.0, -1.0, 2.0)]
    assert all_advantages(Algorithm(name="gpg"), groups) == pytest.approx(expected)
    deviation = all_advantages(Algorithm(name="gpg", advantages={"normalize_std": True, "eps": 1e-12}), groups)
    assert deviation[:2] == pytest.approx([alpha * math.sqrt(0.5), -alpha * math.sqrt(0.5)])
    # A second trajectory of a rollout is no further rollout; without any difference nothing is divided by 0.
    twin = trajectory("a", 0, 1.0, id="a/0b")
    groups[0].trajectories.append(twin)
    assert all_advantages(Algorithm(name="gpg"), groups)[:3] == pytest.approx([*expected[:2], expected[0]])
    assert all_advantages(Algorithm(name="gpg"), groups[1:3]) == [0.0, 0.0, 0.0]


def test_sapo_and_gspo_weight_rollouts_equally_at_every_length():
    """Mean over sequences of the means over their tokens: 1/4 each for two tokens, 1/16 for eight."""
    for name in ("sapo", "gspo"):
        members = [trajectory("a", 0, 1.0, sampled=2), trajectory("a", 1, 0.0, sampled=8)]
        weights = loss_weights(members, Algorithm(name=name).aggregation)
        assert weights[0][1:].tolist() == [0.25] * 2 and weights[1][1:].tolist() == [0.0625] * 8
