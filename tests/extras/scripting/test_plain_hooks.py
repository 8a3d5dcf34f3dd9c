"""Hooks that are plain functions work like async ones, and block no event loop."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from decimal import Decimal
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch

from slimx.data.records import Group, Prompt, Trajectory
from slimx.environments.base import Step
from slimx.errors import SlimxError
from slimx.extras.scripting.plain_hooks import PlainGenerate, PlainReward
from slimx.rewards import needs
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.reward_pool import RewardPool
from slimx.rollout.hook_loading import load_generate, load_reward, load_rewards, name_of
from slimx.rollout.hooks import RewardContext, RolloutContext
from slimx.runtime.tasks import in_thread
from tests.extras.rewards.reward_stand import context, trajectory
from tests.refusals import refused
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


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", b"1", 1j, [1.0], torch.ones(2)], ids=repr)
async def test_what_is_no_number_is_refused(value: Any):
    with refused("reward.returned", about="reward"):
        await judged(PlainReward(lambda ctx, t: value), context())


async def test_a_plain_reward_may_run_an_event_loop_of_its_own():
    async def later() -> float:
        await asyncio.sleep(0)
        return 0.5

    pool = RewardPool(PlainReward(lambda ctx, t: asyncio.run(later())), workers=1, deadline_s=30)
    assert [await pool.judge(context(), trajectory()) for _ in range(2)] == [(0.5, {})] * 2
    pool.close()


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
        (torch.tensor(0.25), (0.25, {})),
        (np.array(0.5), (0.5, {})),
        (Decimal("0.5"), (0.5, {})),
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
    assert (outcomes[0].code, outcomes[0].about) == ("hooks.ended", "rollout.rollout_deadline")


class Served:
    """A client of a frozen model, a stream, a server and an environment: what a hook can await."""

    def __init__(self) -> None:
        self.closed = 0

    async def chat(self, text: str) -> str:
        await asyncio.sleep(0)
        assert threading.current_thread() is threading.main_thread()
        return text.upper()

    @asynccontextmanager
    async def session(self, session: object) -> AsyncIterator[str]:
        yield "http://x"
        self.closed += 1

    def stream(self, request: GenerationRequest) -> AbstractAsyncContextManager[Any]:
        return Stream(self, request)


class Stream:
    def __init__(self, served: Served, request: GenerationRequest) -> None:
        self.served, self.request = served, request
        self.completion: Completion | None = None

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.served.closed += 1

    async def __aiter__(self) -> AsyncIterator[Completion]:
        for _ in range(2):
            self.completion = await FakeEngine().generate(self.request)
            yield self.completion


class World:
    async def reset(self, prompt: Prompt, seed: int) -> str:
        return "begin"

    async def step(self, text: str) -> Step:
        return Step(text=text, reward=1.0, done=True)

    async def close(self) -> None:
        pass


def uses_everything(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    assert isinstance(ctx, RolloutContext) and isinstance(ctx.engines["judge"], Served)
    other = ctx.policies["other"]
    draft = other.draft(prompt)
    draft.add_sampled(other.engine.generate(draft.token_ids))
    draft.add_sampled(ctx.policies["other"].policies["actor"].engine.generate(draft.token_ids, turn=1))
    with ctx.engine.stream(draft.token_ids) as stream:
        pieces = [piece.token_ids.size for piece in stream]
        draft.add_sampled(stream.completion)
    with pytest.raises(SlimxError):
        ctx.turn_with_images([], after=[])
    with ctx.proxy.session(None) as url:
        said = ctx.engines["judge"].chat(url)
    world = ctx.environments.make(f"{__name__}.World", {}, deadline_s=9, rollout="r")
    begin = world.reset(prompt, 1)
    step = world.step(begin)
    world.close()
    ctx.log("a", 1.0)
    return draft.finish(metadata={"pieces": pieces, "said": said, "reward": step.reward})


async def asynchronously(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids))
    said = await ctx.engines["judge"].chat("a")
    return draft.finish(metadata={"said": said})


async def with_a_stream(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    ctx = replace(ctx, engine=replace(ctx.engine, seed=3))
    draft = ctx.draft(prompt)
    async with ctx.engine.stream(draft.token_ids) as stream:
        async for _ in stream:
            pass
    draft.add_sampled(stream.completion)
    return draft.finish(metadata={"said": await ctx.engines["judge"].chat("a")})


class Called:
    async def __call__(self, ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        return await with_a_stream(ctx, prompt)


@wraps(with_a_stream)
def decorated(*arguments: Any) -> Any:
    return with_a_stream(*arguments)


def undeclared(ctx: RolloutContext, prompt: Prompt) -> Any:
    return with_a_stream(ctx, prompt)


def with_its_own_loop(ctx: RolloutContext, prompt: Prompt) -> Any:
    return asyncio.run(asynchronously(ctx, prompt))


called = Called()
bound = partial(called)
twice = partial(partial(undeclared))


def full_context() -> tuple[RolloutContext, Served]:
    served = Served()
    contexts: dict[str, RolloutContext] = {}
    fields: Any = {"engines": {"judge": served}, "policies": contexts, "proxy": served}
    engine = FakeEngine()
    engine.stream = served.stream  # type: ignore[attr-defined]
    contexts |= {name: rollout_context(engine, {}, **fields) for name in ("actor", "other")}
    return contexts["actor"], served


async def test_a_plain_hook_can_wait_for_everything_that_an_async_one_can_await():
    ctx, served = full_context()
    made = await load_generate(config_of(generate=f"{__name__}.uses_everything"))(ctx, prompts()[0])
    assert made.metadata == {"pieces": [3, 3], "said": "HTTP://X", "reward": 1.0} and served.closed == 2
    assert len(made.token_ids) - made.loss_mask.argmax() == 9 and ctx.metrics == {"a": 1.0}


@pytest.mark.parametrize("name", ["decorated", "undeclared", "called", "bound", "twice", "with_its_own_loop"])
async def test_an_async_hook_in_another_form_is_awaited(name: str):
    ctx, _ = full_context()
    made = await load_generate(config_of(generate=f"{__name__}.{name}"))(ctx, prompts()[0])
    assert made.metadata == {"said": "A"} and made.spans[-1].source == "sampled"


@pytest.mark.parametrize("way", ["with", "for"])
async def test_a_coroutine_that_would_block_the_run_is_refused(way: str):
    ctx, served = full_context()

    def takes(ctx: RolloutContext, prompt: Prompt) -> Any:
        stream = ctx.engine.stream([1])

        async def later() -> Trajectory:
            if way == "with":
                with stream:
                    pass
            return [*stream][0]

        return later()

    with refused("hooks.blocking", about="with"):
        await asyncio.wait_for(PlainGenerate(takes)(ctx, prompts()[0]), 30)
    assert served.closed == 0


async def tasks_and_streams(ctx: RolloutContext, stream: Any) -> dict[str, Any]:
    async with asyncio.TaskGroup() as group:
        said = [group.create_task(ctx.engines["judge"].chat(text)) for text in ("a", "b")]
    async with stream as entered:
        pieces = [piece.token_ids.size async for piece in entered]
    return {"said": [task.result() for task in said], "pieces": pieces}


@pytest.mark.parametrize("own", [True, False], ids=["of the hook", "of the run"])
async def test_objects_of_a_thread_work_in_an_event_loop(own: bool):
    ctx, served = full_context()

    def hook(ctx: RolloutContext, prompt: Prompt) -> Any:
        working = tasks_and_streams(ctx, ctx.engine.stream([1]))
        return asyncio.run(working) if own else working

    made: Any = await PlainGenerate(hook)(ctx, prompts()[0])
    assert made == {"said": ["A", "B"], "pieces": [3, 3]} and served.closed == 1


async def test_objects_of_a_thread_are_copied_compared_and_changed_like_others():
    ctx, served = full_context()

    def hook(ctx: RolloutContext, prompt: Prompt) -> Any:
        judge = ctx.engines["judge"]
        judge.closed = 5
        other = copy.copy(judge)
        other.closed = 7
        assert judge == ctx.engines["judge"] and judge == served and {judge: 1}[ctx.engines["judge"]] == 1
        assert other != judge and other.chat("a") == "A" and not hasattr(judge, "__deepcopy__")
        return judge.closed, other.closed

    made: Any = await PlainGenerate(hook)(ctx, prompts()[0])
    assert made == (5, 7) and served.closed == 5


CALLER: ContextVar[str] = ContextVar("CALLER")


async def test_a_thread_has_the_context_variables_of_its_caller():
    CALLER.set("of the run")
    assert await in_thread(CALLER.get) == "of the run"


async def test_a_plain_reward_waits_for_a_judge():
    def asks(ctx: RewardContext, judged: Trajectory) -> float:
        return float(ctx.engines["judge"].chat("a") == "A")

    ctx = replace(context(), engines={"judge": Answers()})
    assert await judged(PlainReward(asks), ctx) == (1.0, {})
    assert await judged(PlainReward(partial(asks)), ctx) == (1.0, {})


class Answers:
    async def chat(self, text: str) -> str:
        await asyncio.sleep(0)
        return text.upper()


def test_options_stay_visible_on_a_plain_hook():
    hook = PlainGenerate(partial(generate, depth=3))
    assert hook.keywords == {"depth": 3} and hook.func is generate
