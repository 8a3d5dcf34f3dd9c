"""Credit: how the rewards of a rollout are shared out among its trajectories, and that nothing else changes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from examples import influence
from slimx.algorithms.advantages.estimate import StepData, all_advantages, finish_advantages
from slimx.algorithms.credit import credited, load_credit
from slimx.config.sections.algorithm import Algorithm
from slimx.data.records import Group, Prompt, Span, Trajectory
from slimx.orchestration.batches import make_update_rows
from slimx.orchestration.policies import in_order, of_policy
from tests.refusals import invalid, refused
from tests.unit.rollout.rollout_stand import config_of

REWARDS = ((1.0, 0.0, 0.5), (0.0, 1.0, 1.0))
"""Rewards of the trajectories of each rollout: of the actor, and twice of the judge."""


def group() -> Group:
    trajectories = [
        Trajectory(
            id=f"g/{index}-{number}",
            rollout_id=f"g/{index}",
            group_id="g",
            index=index,
            policy="judge" if number else "actor",
            token_ids=np.arange(3, dtype=np.int32),
            loss_mask=np.array([0, 1, 1], np.uint8),
            logprobs=np.zeros(3, np.float32),
            spans=[Span(start=0, stop=1, source="prompt"), Span(start=1, stop=3, source="inserted")],
            reward=reward,
        )
        for index, rewards in enumerate(REWARDS)
        for number, reward in enumerate(rewards)
    ]
    return Group(id="g", prompt=Prompt(id="p", token_ids=[0]), trajectories=trajectories)


def rewards_of(groups: list[Group]) -> list[float]:
    return [trajectory.reward for g in groups for trajectory in g.trajectories]


def test_own_rewards_stay_and_shared_ones_are_the_mean_of_the_rollouts() -> None:
    original = group()
    assert credited([original], "own")[0] is original
    shared = credited([original], "shared")
    assert rewards_of(shared) == pytest.approx([0.5] * 3 + [2 / 3] * 3)
    assert rewards_of([original]) == [*REWARDS[0], *REWARDS[1]], "the groups that are kept say what was earned"


def test_each_policy_is_compared_with_itself_alone() -> None:
    algorithm = Algorithm(advantages={"normalize_std": False})
    advantages = all_advantages(algorithm, of_policy([group()], "actor"))
    assert advantages == pytest.approx([0.5, -0.5])
    # A rollout counts once in a policy, too: the judge's two trajectories have the mean of theirs.
    judged = all_advantages(algorithm, of_policy([group()], "judge"))
    assert judged == pytest.approx([-0.375, -0.375, 0.375, 0.375])
    shared = all_advantages(algorithm, of_policy(credited([group()], "shared"), "actor"))
    assert shared == pytest.approx([-1 / 12, 1 / 12])


@pytest.mark.parametrize("name", ["reinforce_pp", "ppo"])
def test_rewards_of_tokens_are_the_credited_ones(name: str) -> None:
    algorithm = Algorithm(name=name, advantages={"whiten": False}, credit="shared")
    actor_groups = of_policy([group()], "actor")
    (rows,) = make_update_rows(
        config_of(), of_policy(credited([group()], "shared"), "actor"), lambda groups: all_advantages(algorithm, groups)
    )
    values = [np.zeros(len(row), np.float32) for row in rows]
    finish_advantages(algorithm, StepData(groups=actor_groups, updates=[rows], values=values, seed=(0,)))
    assert [row.advantages[row.weight > 0].tolist() for row in rows] == [
        pytest.approx([reward] * 2) for reward in (0.5, 2 / 3)
    ]


def test_values_of_several_policies_return_in_trajectory_order() -> None:
    groups = [group()]
    values = {name: [t.id for g in of_policy(groups, name) for t in g.trajectories] for name in ("judge", "actor")}
    assert in_order(groups, values) == [trajectory.id for trajectory in groups[0].trajectories]
    assert of_policy(groups, "writer") == []


@pytest.mark.parametrize("kind", ["quality", "margin"])
def test_the_influence_aware_split_follows_martis_formula(kind: str) -> None:
    expected = []
    for rewards in np.array(REWARDS):
        expected.append(rewards[0])
        for turn in (1, 2):
            before, reward = rewards[:turn].mean(), rewards[turn]
            term = before * reward - (1 - before) * (1 - reward) if kind == "quality" else reward - before
            expected.append(reward + 0.5 * term)
    found = rewards_of(credited([group()], f"examples.influence.{kind}"))
    assert found == pytest.approx(expected) and influence.ALPHA == 0.5


def too_few(group: Group) -> list[float]:
    return [0.0]


def not_a_number(group: Group) -> list[float]:
    return [math.nan] * len(group.trajectories)


@pytest.mark.parametrize("hook", ["too_few", "not_a_number"])
def test_a_hook_that_gives_no_reward_for_a_trajectory_is_refused(hook: str) -> None:
    path = f"{__name__}.{hook}"
    with refused("hook.credit_result", about=path):
        load_credit(path)(group())


def test_a_credit_that_is_none_or_has_nothing_to_share_is_refused() -> None:
    with invalid("algorithm.unknown", about="algorithm.credit"):
        Algorithm(credit="fair")
    for name in ("sft", "remax"):
        with invalid("algorithm.unused", about="algorithm.credit"):
            Algorithm(name=name, credit="shared")


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg"])
def test_shared_credit_is_refused_if_it_averages_out(name: str) -> None:
    shared = {"algorithm__name": name, "algorithm__credit": "shared"}
    alone = {"policies__solver": {"shares": "actor"}}
    for policies in ({}, alone):
        with invalid("policies.shared_credit", about="algorithm.credit"):
            config_of(**shared, **policies)
    assert config_of(**shared, policies__judge={}).algorithm.credit == "shared"
    assert config_of(algorithm__credit="examples.influence.quality", **alone).algorithm.credit != "own"
