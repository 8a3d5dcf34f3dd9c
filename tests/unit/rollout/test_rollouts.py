"""A group whose rollout, reward or filter breaks is dropped with its reason, replaced, and takes no other along."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slimx.data.prompts.read import PromptSource
from slimx.data.records import Group, Prompt, Trajectory
from slimx.errors import DeadlineError, SlimxError
from slimx.rollout import single_turn
from slimx.rollout.client.sending import REQUEST
from slimx.rollout.flow.reward_pool import RewardPool
from slimx.rollout.hooks import Generate, Reward, RewardContext, RolloutContext
from tests.refusals import numbers, refused
from tests.unit.rollout.rollout_stand import Stand, config_of, ids_of, one, prompts, the_tokenizer
from tests.waits import until


def second_prompt() -> str:
    """Returns the id of the prompt that ticket 1 gets."""
    source = PromptSource(prompts(), 1)
    return [source.next().id for _ in range(2)][1]


# Rewards that break ---------------------------------------------------------------------------------------------------


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set when the test ends, so that no hook hangs longer."""
    event = threading.Event()
    yield event
    event.set()


def poisoned(prompt_id: str, index: int, what: Any, released: threading.Event) -> Reward:
    """Returns a reward of 0.5, except for one rollout of one prompt."""

    async def reward(ctx: RewardContext, trajectory: Trajectory) -> Any:
        if (ctx.prompt.id, trajectory.index) != (prompt_id, index):
            return 0.5
        if what == "hangs":
            while not released.is_set():
                await asyncio.sleep(0.005)
            return 0.5
        if what == "blocks":
            released.wait()
            return 0.5
        if isinstance(what, BaseException):
            raise what
        return what

    return reward


BROKEN = {
    "raises": (ValueError("no verdict on 1+1"), "reward failed", "ValueError: no verdict on 1+1"),
    "exits": (SystemExit(3), "reward failed", "SystemExit: 3"),
    "hangs in await": ("hangs", "reward deadline", "trajectory g1/1"),
    "hangs in a blocking call": ("blocks", "reward deadline", "trajectory g1/1"),
    "returns NaN": (float("nan"), "reward failed", "returned nan"),
    "returns infinity": (-math.inf, "reward failed", "returned -inf"),
    "returns a string": ("1.0", "reward failed", "returned '1.0'"),
    "returns None": (None, "reward failed", "returned None"),
    "returns no parts": ({}, "reward failed", "returned an empty dict"),
    "returns a part that is NaN": ({"a": 1.0, "b": float("nan")}, "reward failed", "returned nan for key 'b'"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_reward_fails_its_trajectory_and_drops_its_group_only(released, case):
    what, reason, text = BROKEN[case]
    deadline = 3 if reason == "reward deadline" else 300
    config = config_of(max_failed_share=1.0, reward__deadline=deadline, reward__workers=1)
    reward = poisoned(second_prompt(), 1, what, released)
    async with Stand(config, reward=reward) as stand:
        batch = await stand.next_batch()
        assert ids_of([batch]) == ["g0", "g2", "g3", "g4"], "ticket 1 must be replaced by a new one at the end"
        assert batch.dropped == Counter({reason: 1})
        for group in batch.groups:
            assert [(t.status, t.reward) for t in group.trajectories] == [("completed", 0.5)] * 2
        (dropped,) = stand.dropped
        assert dropped.failed and dropped.reason == reason and text in dropped.detail
        good, bad = stand.outcomes[dropped.group].group.trajectories
        assert (good.status, good.reward) == ("completed", 0.5)
        assert bad.status == "failed" and bad.reward is None and text in bad.finish_reason
        released.set()
        await asyncio.sleep(0.05)
        assert bad.status == "failed" and bad.reward is None, "a verdict after the deadline must not count"


async def test_a_timeout_error_inside_a_reward_is_an_error_of_the_hook(released):
    config = config_of(max_failed_share=1.0, reward__deadline=30)
    reward = poisoned(second_prompt(), 0, TimeoutError("sandbox did not answer"), released)
    async with Stand(config, reward=reward) as stand:
        batch = await stand.next_batch()
        assert batch.dropped == Counter({"reward failed": 1})
        assert "TimeoutError: sandbox" in stand.dropped[0].detail


async def test_parts_of_a_reward_are_kept_and_add_up():
    async def reward(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
        return {"right": 1, "short": -0.25}

    async with Stand(config_of(), reward=reward) as stand:
        for group in (await stand.next_batch()).groups:
            for trajectory in group.trajectories:
                assert trajectory.reward == 0.75 and trajectory.reward_parts == {"right": 1.0, "short": -0.25}


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int64(1)])
async def test_a_reward_may_be_any_real_number(value):
    async def reward(ctx: RewardContext, trajectory: Trajectory) -> Any:
        return value

    async with Stand(config_of(), reward=reward) as stand:
        rewards = [t.reward for group in (await stand.next_batch()).groups for t in group.trajectories]
    assert rewards == [1.0] * 8 and {type(r) for r in rewards} == {float}


async def test_a_reward_receives_the_text_sampled_for_its_prompt():
    seen = {}

    async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
        seen[trajectory.id] = (ctx.prompt.answer, ctx.text)
        return 0.0

    async with Stand(config_of(), reward=reward) as stand:
        for group in (await stand.next_batch()).groups:
            for t in group.trajectories:
                assert seen[t.id] == (group.prompt.answer, the_tokenizer().decode(t.token_ids[-3:].tolist()))


async def test_waiting_for_a_free_worker_does_not_count_against_the_deadline(monkeypatch):
    loop, passed = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + passed)

    async def slow(ctx: RewardContext, trajectory: Trajectory) -> float:
        nonlocal passed
        passed += 30
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()  # timers that are due have run
        return 1.0

    config = config_of(reward__workers=1, reward__deadline=200)
    async with Stand(config, reward=slow) as stand:
        batch = await stand.next_batch()  # 8 calls of 30 s in one thread: the last one waits for 210 s
        assert not batch.dropped


def reward_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "slimx-reward"]


async def test_a_hanging_reward_is_replaced_by_one_thread(released):
    before = set(reward_threads())

    def started() -> set[threading.Thread]:
        return set(reward_threads()) - before

    config = config_of(max_failed_share=1.0, reward__deadline=3, reward__workers=2)
    async with Stand(config, reward=poisoned(second_prompt(), 0, "blocks", released)) as stand:
        await stand.next_batch()
        assert len(started()) == 3, "2 workers and the one that hangs"
        released.set()
        await until(lambda: len(started()) == 2)
    await until(lambda: len(started()) == 0)


async def test_a_call_cancelled_before_it_has_a_worker_costs_none(released):
    async def reward(ctx: Any, trajectory: Any) -> float:
        while not released.is_set():
            await asyncio.sleep(0.005)
        return 1.0

    pool = RewardPool(reward, workers=1, deadline_s=300)
    try:
        running = asyncio.create_task(pool.judge(None, None))
        queued = asyncio.create_task(pool.judge(None, None))
        await asyncio.sleep(0.05)
        queued.cancel()
        released.set()
        assert await running == (1.0, {})
        async with asyncio.timeout(60):
            assert await pool.judge(None, None) == (1.0, {})
    finally:
        pool.close()


async def test_the_deadline_of_a_reward_counts_from_its_start(released):
    """Three that hang, one after the other on one worker: the deadlines of those that begin late are looked at too."""

    async def reward(ctx: Any, trajectory: Any) -> float:
        if trajectory.id != "right":
            released.wait(30)
        return 1.0

    pool = RewardPool(reward, workers=1, deadline_s=0.05)
    try:
        async with asyncio.timeout(60):
            errors = await asyncio.gather(
                *(pool.judge(None, SimpleNamespace(id=name)) for name in "abc"), return_exceptions=True
            )
            assert [type(error) for error in errors] == [DeadlineError] * 3
            assert all(f"trajectory {name}" in str(error) for name, error in zip("abc", errors, strict=True))
            pool.deadline_s = 20
            assert await pool.judge(None, SimpleNamespace(id="right")) == (1.0, {})
        assert pool.abandoned == 3
    finally:
        pool.close()


async def test_a_reward_requested_after_the_pool_closed_is_refused():
    async def reward(ctx: Any, trajectory: Any) -> float:
        return 1.0

    pool = RewardPool(reward, workers=1, deadline_s=300)
    pool.close()
    with refused("reward.ended", about="trajectory t"):
        async with asyncio.timeout(60):
            await pool.judge(None, SimpleNamespace(id="t"))


def test_a_reward_that_ends_after_the_run_raises_nothing_in_its_thread(released, monkeypatch):
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    before = set(reward_threads())

    async def interrupted() -> None:
        async with Stand(config_of(), reward=poisoned(second_prompt(), 0, "blocks", released)) as stand:
            waiting = asyncio.create_task(stand.next_batch())
            await asyncio.sleep(0.1)
            waiting.cancel()

    asyncio.run(interrupted())
    released.set()
    for thread in set(reward_threads()) - before:
        thread.join(60)
    assert not raised


# Rollouts that break --------------------------------------------------------------------------------------------------


def generating(prompt_id: str, what: Any) -> Generate:
    """Returns single_turn, except for rollout 1 of one prompt."""

    async def generate(ctx: RolloutContext, prompt: Prompt) -> Any:
        trajectory = await single_turn.generate(ctx, prompt)
        if (prompt.id, ctx.index) != (prompt_id, 1):
            return trajectory
        if what == "hangs":
            await asyncio.sleep(30)
        if what in ("aborted", "failed"):
            trajectory.status = what
            return trajectory
        if what == "nan":
            trajectory.logprobs[-1] = np.nan
            return trajectory
        if isinstance(what, Exception):
            raise what
        return what

    return generate


BROKEN_ROLLOUTS = {
    "raises": (KeyError("tool"), "generate failed", "single_turn raised KeyError: 'tool'"),
    "is refused by the engine": (SlimxError("no engine answers"), "generate failed", "no engine answers"),
    "is not answered in time": (DeadlineError(REQUEST, 600, "http://r"), "engine deadline", "http://r"),
    "waits for something else": (DeadlineError("a tool", 5, "its server"), "generate failed", "its server"),
    "hangs": ("hangs", "generate deadline", "rollout g1/1"),
    "returns something else": ({"text": "2"}, "generate failed", "returned an object of type dict"),
    "returns nothing": ([], "generate failed", "returned no trajectory for g1/1"),
    "is aborted": ("aborted", "generate failed", "rollout g1/1 was aborted"),
    "has a token without log-prob": ("nan", "generate failed", "g1/1 with a sampled token"),
}


@pytest.mark.parametrize("case", BROKEN_ROLLOUTS)
async def test_a_broken_rollout_drops_its_group_only(case):
    what, reason, text = BROKEN_ROLLOUTS[case]
    config = config_of(max_failed_share=1.0, rollout_deadline=15 if what == "hangs" else 600)
    async with Stand(config, generate=generating(second_prompt(), what), reward=one) as stand:
        batch = await stand.next_batch()
        assert ids_of([batch]) == ["g0", "g2", "g3", "g4"]
        assert batch.dropped == Counter({reason: 1})
        (outcome,) = stand.dropped
        assert outcome.failed and outcome.reason == reason and text in outcome.detail
        assert outcome.prompt == second_prompt()


async def test_a_hook_may_give_up_a_rollout_by_its_status():
    config = config_of(max_failed_share=1.0)
    async with Stand(config, generate=generating(second_prompt(), "failed")) as stand:
        batch = await stand.next_batch()
        assert batch.dropped == Counter({"generate failed": 1})


async def test_a_timeout_error_inside_a_rollout_is_an_error_of_the_hook():
    config = config_of(max_failed_share=1.0)
    hook = generating(second_prompt(), TimeoutError("tool did not answer"))
    async with Stand(config, generate=hook) as stand:
        batch = await stand.next_batch()
        assert batch.dropped == Counter({"generate failed": 1})
        assert "TimeoutError: tool" in stand.dropped[0].detail


async def test_an_internal_error_reaches_the_loop():
    mistake = RuntimeError("teacher out of order")

    async def broken(*_: object) -> None:
        raise mistake

    async with Stand(config_of(), reward=one, score=broken) as stand:
        with pytest.raises(RuntimeError) as caught:
            await stand.next_batch()
    assert caught.value is mistake


# Shares and filters ---------------------------------------------------------------------------------------------------


def failing(*tickets: int) -> Generate:
    """Returns single_turn, except that the groups of some tickets raise."""

    async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        if int(ctx.group_id[1:]) in tickets:
            raise ValueError(f"ticket {ctx.group_id} is unlucky")
        return await single_turn.generate(ctx, prompt)

    return generate


async def test_too_many_failures_stop_the_run_with_the_last_reason():
    async with Stand(config_of(max_failed_share=0.25), generate=failing(1, 2)) as stand:
        with refused("rollout.failed", about="rollout.max_failed_share") as caught:
            await stand.next_batch()
    text = str(caught.value)
    assert numbers(text)[:3] == [2, 4, 0.25], "groups that failed, groups of a step, and the share"
    assert "single_turn" in text and "ValueError: ticket g2" in text


async def test_failures_within_the_share_of_each_step_do_not_add_up_over_steps():
    async with Stand(config_of(max_failed_share=0.25), generate=failing(1, 6, 11)) as stand:
        batches = [await stand.next_batch() for _ in range(3)]
    assert [batch.dropped.total() for batch in batches] == [1, 1, 1]
    assert ids_of(batches) == [f"g{n}" for n in range(15) if n not in (1, 6, 11)]


async def test_filtered_groups_are_counted_by_reason_replaced_and_no_failure():
    def keep(group: Group) -> bool | str:
        number = int(group.id[1:])
        return {1: "too easy", 2: False, 5: "too easy"}.get(number, True)

    config = config_of(max_failed_share=0.0)
    async with Stand(config, reward=one, keep=keep) as stand:
        first, second = await stand.next_batch(), await stand.next_batch()
    assert ids_of([first]) == ["g0", "g3", "g4", "g6"]
    assert first.dropped == Counter({"filter: too easy": 2, "filter": 1})
    assert ids_of([second]) == ["g7", "g8", "g9", "g10"] and not second.dropped
    assert not any(outcome.failed for outcome in stand.dropped)


async def test_a_filter_that_raises_is_a_failure_with_its_text():
    def keep(group: Group) -> bool:
        raise ZeroDivisionError("no spread")

    async with Stand(config_of(max_failed_share=0.0), reward=one, keep=keep) as stand:
        with refused("rollout.failed", about="rollout.max_failed_share"):
            await stand.next_batch()


async def test_a_filter_may_answer_with_a_numpy_bool():
    """The filter of dynamic sampling as everybody writes it."""

    async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
        return float(trajectory.index)

    def keep(group: Group) -> Any:
        return np.std([t.reward for t in group.trajectories]) > 0

    async with Stand(config_of(schedule__step_deadline=60), reward=reward, keep=keep) as stand:
        assert not (await stand.next_batch()).dropped
