"""Groups of rollout workers: the same as those of one process, whatever happens to a worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.data.saved.codec import decode, encode
from slimx.extras.rollout_workers.member import LOST, MAX_LOSSES
from slimx.rollout.flow.tickets import SavedTicket
from slimx.rollout.hooks import seed_of
from tests.extras.rollout_workers.workers_stand import (
    GROUP_SIZE,
    STEP_SIZE,
    TOKENS,
    Engine,
    Rollouts,
    content,
    make_config,
)

pytestmark = pytest.mark.usefixtures("cluster")


async def run(config: Config, steps: int, workers: int, engine: Engine | None = None) -> tuple[list[Any], Rollouts]:
    engine = engine or Engine()
    async with engine.served(), Rollouts(config, engine).started(workers) as rollouts:
        return content(await rollouts.batches(steps)), rollouts


def struck(directory: Path) -> list[str]:
    return (directory / "struck").read_text().split()


@pytest.mark.parametrize("staleness", [0, 2])
async def test_groups_do_not_depend_on_the_number_of_workers(tmp_path, model, staleness):
    config = make_config(tmp_path, model, f"schedule.max_staleness={staleness}")
    alone, in_process = await run(config, 3, 0)
    shared, rollouts = await run(config, 3, 3)
    assert shared == alone
    if not staleness:
        assert {drop.group for drop in rollouts.dropped} == {drop.group for drop in in_process.dropped} != set()
    assert rollouts.restarts == [] and not (tmp_path / "journals").exists()


SLOW = pytest.mark.slow("starts workers several times")


@pytest.mark.parametrize(
    "strike",
    [
        "die_once",
        *(pytest.param(strike, marks=SLOW) for strike in ("stop_once", "sleep_once", "match_once", "grow_once")),
    ],
)
async def test_a_lost_worker_costs_no_answered_token(tmp_path, model, strike):
    alone, _ = await run(make_config(tmp_path, model), 1, 0)
    limits = ("rollout.worker_deadline=4", "rollout.worker_resources.memory=2.5")
    engine = Engine()
    config = make_config(tmp_path, model, *limits, strike=strike, pause=0.5)
    shared, rollouts = await run(config, 1, 2, engine)
    assert shared == alone
    assert [restart.error for restart in rollouts.restarts] == [""] and len(struck(tmp_path)) == 1
    seed = config.run.seed
    first = {seed_of(seed_of(seed, number, index), 0) for number in range(STEP_SIZE) for index in range(GROUP_SIZE)}
    counts = [count for (request, _), count in engine.sampled.items() if request in first]
    assert counts == [1] * len(first) * TOKENS  # the first turns of all groups were answered before the loss
    if strike == "sleep_once":
        assert "worker_hooks.py" in rollouts.notes[0] and "g1" in rollouts.notes[0]


@SLOW
async def test_a_group_that_always_kills_its_worker_is_dropped(tmp_path, model):
    config = make_config(tmp_path, model, "rollout.max_failed_share=0.2", strike="die")
    shared, rollouts = await run(config, 1, 2)
    assert [drop.reason for drop in rollouts.dropped if drop.group == "g1"] == [LOST]
    assert len(struck(tmp_path)) == MAX_LOSSES == len(rollouts.restarts)
    assert all(group != "g1" for group, _, _ in shared)


async def test_a_checkpoint_contains_the_progress_of_workers(tmp_path, model):
    config = make_config(tmp_path, model, pause=0.5)
    alone, _ = await run(config, 2, 0)
    engine = Engine()
    async with engine.served():
        async with Rollouts(config, engine).started(2) as rollouts:
            batch = asyncio.create_task(rollouts.manager.next_batch())
            await asyncio.sleep(0.4)  # first turns are answered, second ones have not begun
            batch.cancel()
            await rollouts.manager.rest()
            await rollouts.manager.maker.collect()
            state = rollouts.manager.state()
            state["tickets"] = decode(list[SavedTicket], encode(state["tickets"]))
        before = dict(engine.sampled)
        async with Rollouts(config, engine).started(3) as resumed:
            resumed.manager.restore(state)
            assert content(await resumed.batches(2)) == alone
    assert before and all(engine.sampled[token] == 1 for token in before)


async def test_workers_follow_outages_and_report_lost_engines(tmp_path, model):
    config = make_config(tmp_path, model, "rollout.rollout_deadline=3")
    alone, _ = await run(config, 1, 0)
    engine = Engine()
    engine.failing = 5
    async with engine.served(), Rollouts(config, engine).started(2) as rollouts:
        rollouts.outage.begin()
        batch = asyncio.create_task(rollouts.batches(1))
        await asyncio.sleep(4)  # longer than the deadlines
        assert not batch.done() and not engine.sampled
        rollouts.outage.end()
        assert content(await batch) == alone
    assert rollouts.looks == 5
