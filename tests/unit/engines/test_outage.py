"""While no engine serves nothing fails: rollouts, batches and stragglers have their deadlines left when one is back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slimx.engines.outage import Outage, RemoteOutage
from slimx.errors import DeadlineError
from slimx.rollout.client.request import GenerationRequest
from slimx.runtime.clocks import Clock
from tests.unit.rollout.rollout_stand import FakeEngine, Stand, config_of
from tests.virtual_time import virtually


class Away(FakeEngine):
    """Answers only while `there` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.there = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Any:
        await self.there.wait()
        return await super().generate(request)


@pytest.mark.parametrize("key", ["rollout_deadline", "schedule__step_deadline"])
@virtually
async def test_an_outage_longer_than_the_deadlines_fails_no_rollout_and_no_batch(key):
    engine = Away()
    async with Stand(config_of(**{key: 0.3}), engine=engine) as stand:
        outage = stand.maker.outage
        waiting = asyncio.create_task(stand.next_batch())
        await asyncio.sleep(0.05)
        outage.begin()
        await asyncio.sleep(0.7)
        outage.end()
        engine.there.set()
        batch = await asyncio.wait_for(waiting, 300)
        assert len(batch.groups) == 4 and not batch.dropped and not stand.dropped


@virtually
async def test_a_deadline_pauses_during_an_outage():
    async with Stand(config_of(schedule__step_deadline=0.4), engine=Away()) as stand:
        stand.maker.outage.begin()
        waiting = asyncio.create_task(stand.next_batch())
        await asyncio.sleep(0.6)
        assert not waiting.done()
        stand.maker.outage.end()
        with pytest.raises(DeadlineError):
            await asyncio.wait_for(waiting, 300)


@virtually
async def test_a_straggler_is_not_abandoned_while_no_engine_serves():
    engine = Away()
    seeds: list[int] = []

    async def generate(request: GenerationRequest) -> Any:
        seeds.append(request.seed)
        if len(seeds) == 8:
            await engine.there.wait()
        return await FakeEngine.generate(engine, request)

    engine.generate = generate
    async with Stand(config_of(over_sampling=1.25, schedule__straggler_deadline=0.3), engine=engine) as stand:
        waiting = asyncio.create_task(stand.next_batch())
        await asyncio.sleep(0.05)
        stand.maker.outage.begin()
        await asyncio.sleep(0.7)
        assert not waiting.done()
        stand.maker.outage.end()
        engine.there.set()
        assert not (await asyncio.wait_for(waiting, 300)).dropped and not stand.dropped


@virtually
async def test_a_clock_pauses_in_overlapping_outages_and_counts_between():
    outage, clock, loop = Outage(), Clock(0.4), asyncio.get_running_loop()
    outage.begin()
    outage.begin()
    began, counted = loop.time(), outage.time()
    with pytest.raises(TimeoutError):
        async with clock:
            with outage.stops(clock):
                await asyncio.sleep(0.3)
                outage.end()
                outage.end()
                await asyncio.sleep(0.1)
                outage.begin()
                await asyncio.sleep(0.3)
                outage.end()
                await asyncio.sleep(30)
    assert clock.expired and loop.time() - began >= 0.95
    assert outage.seconds >= 0.55 and outage.time() - counted < loop.time() - began - 0.5


async def test_an_outage_seen_from_elsewhere_ends_with_it_or_with_all_hope():
    outage, hopeless = Outage(), False
    elsewhere = RemoteOutage(outage, lambda: hopeless)
    assert not elsewhere.lasts
    outage.begin()
    waiting = asyncio.create_task(elsewhere.wait_until_over())
    await asyncio.sleep(0.05)
    assert elsewhere.lasts and not waiting.done()
    hopeless = True
    await asyncio.wait_for(waiting, 300)
    assert not elsewhere.lasts
