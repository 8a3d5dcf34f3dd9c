"""Engines that share devices with trainers start in their own turn only, and the trainers' turn waits for them."""

from __future__ import annotations

import asyncio

from slimx.engines.fleet.handle import MemberState
from slimx.engines.outage import EnginePhase
from tests.unit.engines.recovery_stand import Stand, gone
from tests.virtual_time import virtually

LIMIT_S = 300.0
"""For what would never end."""


@virtually
async def test_an_engine_lost_while_trainers_run_starts_in_the_engine_phase():
    async with Stand(outage_deadline=0.02) as stand:
        await stand.members.engine_phase.end()
        for engine in stand.engines:
            await stand.members.quarantine(engine, gone(engine.name))
        await stand.until(lambda: stand.log.count("stop http://e0/0") == stand.log.count("stop http://e1/0") == 1)
        await asyncio.sleep(0.1)  # many times the patience with an outage, which the trainers' turn does not count in
        assert not [line for line in stand.log if line.startswith("start")] and stand.members.failure() is None
        stand.members.engine_phase.begin()
        await stand.until(lambda: all(engine.state is MemberState.JOINING for engine in stand.engines))
        assert stand.members.failure() is None


async def test_the_end_of_the_engine_phase_waits_for_starts_and_stops():
    async with Stand() as stand:
        stopping, starting, begun = asyncio.Event(), asyncio.Event(), asyncio.Event()
        stop, start = stand.engines[0].stop, stand.engines[0].start

        async def slow_stop(grace_s: float) -> None:
            await stopping.wait()
            await stop(grace_s)

        async def slow_start(deadline_s: float) -> None:
            begun.set()
            await starting.wait()
            await start(deadline_s)

        stand.engines[0].stop, stand.engines[0].start = slow_stop, slow_start
        await stand.members.quarantine(stand.engines[0], gone())
        turn = asyncio.create_task(stand.members.engine_phase.end())
        await asyncio.sleep(0.02)
        assert not turn.done(), "the lost engine still holds its memory"
        stopping.set()
        await asyncio.wait_for(turn, LIMIT_S)
        assert stand.engines[0].state is MemberState.OUT

        stand.members.engine_phase.begin()
        await asyncio.wait_for(begun.wait(), LIMIT_S)
        turn = asyncio.create_task(stand.members.engine_phase.end())
        await asyncio.sleep(0.02)
        assert not turn.done()
        starting.set()
        await asyncio.wait_for(turn, LIMIT_S)
        assert stand.engines[0].state is MemberState.JOINING, "it runs, and can be put to sleep"


async def test_engines_may_start_at_any_time_in_an_open_phase():
    phase = EnginePhase()
    async with asyncio.timeout(LIMIT_S), phase.starting(), phase.stopping():
        assert phase.active
