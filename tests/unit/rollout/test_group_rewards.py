"""A reward that judges a whole group at once: by slimx's form and by slime's, in threads and in processes."""

from __future__ import annotations

from typing import Any

import pytest

from slimx.data.records import Group
from slimx.rollout.flow.rollouts import GroupMaker, GroupOutcome
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.hooks import RewardContext
from slimx.rollout.policy import PolicyClient
from tests.refusals import invalid, numbers, refused
from tests.unit.rollout.rollout_stand import FakeEngine, config_of, prompts, the_tokenizer

HERE = "tests.unit.rollout.test_group_rewards"


async def ranks(ctx: RewardContext, group: Group) -> list[Any]:
    """The place of each answer in the group, by its text."""
    order = sorted(range(len(ctx.texts)), key=ctx.texts.__getitem__)
    assert len(ctx.texts) == len(group.trajectories) and ctx.text == ctx.texts[0]
    return [{"place": order.index(number), "half": 0.5} for number in range(len(order))]


async def one_short(ctx: RewardContext, group: Group) -> list[float]:
    return [1.0] * (len(group.trajectories) - 1)


async def slimes(args: Any, samples: list[Any]) -> list[float]:
    assert args.group_rm and args.bonus == 2
    best = max(sample.response for sample in samples)
    return [float(sample.response == best) * args.bonus for sample in samples]


async def make(**reward: Any) -> GroupOutcome:
    config = config_of(group_size=4, **{f"reward__{key}": value for key, value in reward.items()})
    maker = GroupMaker(config, load_hooks(config), {"actor": PolicyClient(FakeEngine(), the_tokenizer())})
    try:
        return await maker.make(prompts()[0], group_id="0", number=0)
    finally:
        maker.close()


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_every_trajectory_gets_its_place_in_the_group(isolation):
    outcome = await make(function=f"{HERE}.ranks", scope="group", isolation=isolation, workers=1)
    assert outcome.reason is None, outcome.detail
    assert sorted(t.reward for t in outcome.group.trajectories) == [0.5, 1.5, 2.5, 3.5]
    assert all(set(t.reward_parts) == {"place", "half"} for t in outcome.group.trajectories)


async def test_a_list_of_another_length_fails_the_group():
    outcome = await make(function=f"{HERE}.one_short", scope="group")
    assert outcome.reason == "reward failed"
    assert "[1.0, 1.0, 1.0]" in outcome.detail and numbers(outcome.detail)[-1] == 4


async def test_a_batched_reward_of_slime_sees_all_samples():
    outcome = await make(function=f"slime:{HERE}.slimes", scope="group", options={"bonus": 2})
    assert outcome.reason is None, outcome.detail
    assert sorted(t.reward for t in outcome.group.trajectories) == [0.0, 0.0, 0.0, 2.0]


def test_a_reward_that_contradicts_the_scope_is_refused():
    with refused("slime.scope", about="reward.scope"):
        load_hooks(config_of(reward__function=f"slime:{HERE}.slimes"))
    with refused("slime.scope", about="reward.scope"):
        load_hooks(config_of(reward__function="slime:examples.slime_style.right", reward__scope="group"))
    with refused("hooks.scope", about="reward.scope"):
        load_hooks(config_of(reward__scope="group"))
    with refused("hooks.scope", about="reward.scope"):
        load_hooks(config_of(reward__function=f"{HERE}.ranks"))
    with invalid("reward.parts_scope", about="reward.scope"):
        config_of(reward__parts=[{"name": "a", "function": f"{HERE}.ranks"}], reward__scope="group")
