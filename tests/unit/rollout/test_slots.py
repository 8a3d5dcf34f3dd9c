"""Requests in flight and rollouts in flight have bounds of their own: a tool that runs holds no engine."""

from __future__ import annotations

import asyncio

import pytest

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.flow.slots import Slots
from slimx.rollout.hooks import RolloutContext
from slimx.runtime.clocks import Clock
from tests.unit.rollout.rollout_stand import FakeEngine, Stand, config_of
from tests.virtual_time import virtually
from tests.waits import until


class Tools:
    """A hook that samples, then waits for a tool that ends when `released` is set, then samples again."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.running = self.most = 0

    async def generate(self, ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        draft = ctx.draft(prompt)
        draft.add_sampled(await ctx.engine.generate(draft.token_ids))
        self.running += 1
        self.most = max(self.most, self.running)
        await self.released.wait()
        self.running -= 1
        draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=1))
        return draft.finish()


async def test_many_slow_tools_hold_no_place_at_the_engines():
    tools = Tools()
    async with Stand(config_of(concurrency=1), generate=tools.generate) as stand:
        waiting = asyncio.create_task(stand.next_batch())
        await until(lambda: tools.running == 8)
        assert stand.engine.busy == 0 and len(stand.engine.requests) == 8, "all 8 rollouts are in their tool"
        tools.released.set()
        assert len((await waiting).groups) == 4
        assert stand.engine.busiest == 1


async def test_rollouts_in_flight_have_a_separate_bound():
    tools = Tools()
    async with Stand(config_of(max_rollouts=3), generate=tools.generate) as stand:
        waiting = asyncio.create_task(stand.next_batch())
        await until(lambda: tools.running == 3)
        await asyncio.sleep(0.02)
        assert len(stand.engine.requests) == 3
        tools.released.set()
        await waiting
        assert tools.most == 3


@virtually
async def test_waiting_for_engines_does_not_count_against_a_rollouts_deadline():
    engine = FakeEngine()

    async def slow(*arguments: object) -> object:
        await asyncio.sleep(0.25)
        return await FakeEngine.generate(engine, *arguments)

    engine.generate = slow
    config = config_of(concurrency=1, rollout_deadline=1.75)
    async with Stand(config, engine=engine) as stand:
        batch = await stand.next_batch()  # 8 requests of 0.25 s, one at a time
        assert not batch.dropped


async def test_evaluation_requests_go_first_and_unused_places_move_on():
    slots, came, hold = Slots(1), list[str](), asyncio.Event()

    async def request(name: str, first: bool = False) -> None:
        async with Clock(10) as clock, slots.occupy(clock, first=first):
            came.append(name)
            await hold.wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(request("a"))
        tasks = {}
        for name in ("b", "c", "eval 1", "eval 2", "eval 3"):
            tasks[name] = group.create_task(request(name, first=name.startswith("eval")))
            await asyncio.sleep(0)
        await until(lambda: came == ["a"])
        for name in ("b", "eval 2"):
            tasks[name].cancel()  # while it waits
        hold.set()
    assert came == ["a", "eval 1", "eval 3", "c"]
    async with Clock(1) as clock, slots.occupy(clock):
        pass  # no place was lost


async def test_a_slot_granted_to_a_cancelled_waiter_is_not_lost():
    slots = Slots(1)
    async with asyncio.timeout(60), Clock(10) as clock:
        async with slots.occupy(clock):
            waiting = asyncio.create_task(slots.occupy(clock).__aenter__())
            await asyncio.sleep(0)
        waiting.cancel()  # it has the place and does not know yet
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        async with slots.occupy(clock):
            pass


@virtually
async def test_the_clock_goes_on_with_what_was_left_when_the_last_waiter_leaves():
    clock, loop = Clock(0.3), asyncio.get_running_loop()

    async def wait(seconds: float) -> None:
        with clock.paused():
            await asyncio.sleep(seconds)

    began = loop.time()
    with pytest.raises(TimeoutError):
        async with clock:
            await asyncio.sleep(0.1)
            await asyncio.gather(wait(0.2), wait(0.4))
            await asyncio.sleep(60)
    assert clock.expired and 0.65 < loop.time() - began < 50


async def test_a_task_that_outlives_its_rollout_gives_its_place_back():
    slots, clock = Slots(1), Clock(5)

    async def late() -> None:
        async with slots.occupy(clock):
            pass

    async with slots.occupy(Clock(5)), clock:
        left = asyncio.create_task(late())
        await asyncio.sleep(0.01)
    await left
    async with asyncio.timeout(60), slots.occupy(clock):
        pass


async def test_a_request_that_is_cancelled_while_it_waits_takes_no_place():
    slots = Slots(1)
    async with Clock(5) as clock:

        async def wait() -> None:
            async with slots.occupy(clock):
                await asyncio.sleep(0)

        async with slots.occupy(clock):
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(wait(), 60)


@pytest.mark.parametrize(
    "affinity, keys",
    [("prefix", [None] * 4), ("group", ["g0", "g0", "g1", "g1"]), ("rollout", ["g0/0", "g0/1", "g1/0", "g1/1"])],
)
async def test_requests_carry_the_key_of_what_stays_together(affinity, keys):
    async with Stand(config_of(affinity=affinity, prompts_per_step=2)) as stand:
        await stand.next_batch()
        assert sorted((request.affinity for request in stand.engine.requests), key=str) == keys
