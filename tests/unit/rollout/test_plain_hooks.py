"""Hooks that are plain functions work like async ones, and block no event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from slimx.data.records import Group, Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.rewards import needs
from slimx.rollout.flow.returned import verdict_of
from slimx.rollout.flow.reward_pool import RewardPool
from slimx.rollout.hook_loading import PlainGenerate, PlainReward, load_generate, load_reward, load_rewards, name_of
from slimx.rollout.hooks import RewardContext, RolloutContext
from slimx.runtime.tasks import in_thread
from tests.extras.rewards.reward_stand import context, trajectory
from tests.unit.rollout.rollout_stand import FakeEngine, config_of, prompts, rollout_context


def reward(ctx: RewardContext, judged: Trajectory, *, bonus: float = 0.0) -> float:
    assert threading.current_thread() is not threading.main_thread()
    return len(ctx.text) + bonus


def whole_group(ctx: RewardContext, group: Group) -> list[float]:
    return [1.0 for _ in group.trajectories]


@needs.needs_process
def heavy(ctx: RewardContext, judged: Trajectory) -> bool:
    return True


def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    assert threading.current_thread() is not threading.main_thread()
    draft = ctx.draft(prompt)
    for turn in range(2):
        draft.add_sampled(ctx.engine.generate(draft.token_ids, turn=turn))
    return draft.finish(metadata={"turns": 2})


async def judged(hook: Any, ctx: RewardContext) -> Any:
    pool = RewardPool(hook, workers=1, deadline_s=30)
    try:
        return await pool.judge(ctx, trajectory())
    finally:
        pool.close()


async def test_a_plain_reward_runs_in_a_thread_with_its_options():
    hook = load_rewards(config_of(reward__function=f"{__name__}.reward", reward__options={"bonus": 0.5}))
    assert isinstance(hook, PlainReward) and name_of(hook) == f"{__name__}.reward"
    assert await judged(hook, context("four")) == (4.5, {})


async def test_a_blocking_reward_leaves_the_event_loop_alone():
    def slow(ctx: RewardContext, judged: Trajectory) -> float:
        time.sleep(0.3)
        return 1.0

    ticks = 0
    task = asyncio.create_task(judged(PlainReward(slow), context()))
    while not task.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert await task == (1.0, {}) and ticks > 5


async def test_a_function_that_returns_a_coroutine_is_awaited():
    async def inner(ctx: RewardContext, judged: Trajectory) -> float:
        return 0.25

    assert await judged(PlainReward(lambda ctx, t: inner(ctx, t)), context()) == (0.25, {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, (1.0, {})),
        (np.bool_(False), (0.0, {})),
        (3, (3.0, {})),
        (np.float32(0.5), (0.5, {})),
        ({"right": True, "short": np.int64(-1)}, (0.0, {"right": 1.0, "short": -1.0})),
    ],
)
async def test_a_reward_may_be_a_bool_a_number_or_parts(value: Any, expected: Any):
    found = await judged(PlainReward(lambda ctx, t: value), context())
    assert found == expected and type(found[0]) is float


def test_a_plain_reward_of_a_group_and_its_requirements_are_known():
    config = config_of(reward__function=f"{__name__}.whole_group", reward__scope="group")
    assert isinstance(load_reward(config.reward, {}), PlainReward)
    marked = load_reward(config_of(reward__function=f"{__name__}.heavy").reward, {})
    assert needs.asks_for_process(marked)


async def test_a_plain_generate_hook_samples_in_a_thread():
    hook = load_generate(config_of(generate=f"{__name__}.generate"))
    assert isinstance(hook, PlainGenerate)
    made = await hook(rollout_context(FakeEngine(), {}), prompts()[0])
    assert [span.source for span in made.spans] == ["prompt", "sampled", "sampled"] and made.metadata == {"turns": 2}


async def test_a_plain_hook_that_raises_stop_iteration_ends():
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(in_thread(next, iter(())), 60)


async def test_a_plain_generate_hook_gets_nothing_after_its_deadline():
    ended = threading.Event()
    outcomes: list[object] = []

    def lingers(ctx: RolloutContext, prompt: Prompt) -> Any:
        ended.wait(30)
        try:
            outcomes.append(ctx.engine.generate([1]))
        except SlimxError as error:
            outcomes.append(error)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await PlainGenerate(lingers)(rollout_context(FakeEngine(), {}), prompts()[0])
    ended.set()
    while not outcomes:
        await asyncio.sleep(0.01)
    assert isinstance(outcomes[0], SlimxError)


async def test_a_filter_may_be_async():
    group = Group(id="g", prompt=prompts()[0], trajectories=[trajectory()])

    async def keep(group: Group) -> str:
        await asyncio.sleep(0)
        return "too short"

    assert await verdict_of(keep, group, group.trajectories, "keep") == "too short"
    assert await verdict_of(lambda group: np.bool_(True), group, group.trajectories, "keep")


def test_options_stay_visible_on_a_plain_hook():
    hook = PlainGenerate(partial(generate, depth=3))
    assert hook.keywords == {"depth": 3} and hook.func is generate
