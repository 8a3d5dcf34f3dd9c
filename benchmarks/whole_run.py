"""The parts of a run, started as slimx.orchestration.session starts them, for benchmarks that drive its loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.observability.events import Events
from slimx.observability.live.table import LiveTable
from slimx.orchestration.batches import longest_trajectory
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.start.prepare import Prepared
from slimx.orchestration.state.recording import Records
from slimx.trainer.worker import TrainerWorker


@asynccontextmanager
async def started(
    config: Config, prepared: Prepared, note: Callable[[str], None], worker: type[TrainerWorker] = TrainerWorker
) -> AsyncIterator[tuple[TrainerGroup, EngineService]]:
    """Starts trainers of class `worker` and engines; yields them, and stops them at the end of the block. `config` must
    have the transport of `prepared`."""
    directory = Path(config.run.dir)
    logs = directory / "logs"
    logs.mkdir(parents=True)
    actor = prepared.policies[ACTOR]
    trainers = TrainerGroup(config, actor.sizes, "cpu", logs, actor.spec.table, actor.plans, worker=worker)
    try:
        async with EngineService(config, prepared, directory, note=note) as service:
            engines = service.place()[ACTOR]
            await asyncio.gather(trainers.start(), engines.start())
            await service.open(longest_trajectory(config, actor.spec, actor.sizes))
            engines.members.watch()
            yield trainers, service
    finally:
        await trainers.stop()


def make_records(config: Config, prepared: Prepared, table: LiveTable) -> Records:
    """Returns the records of a run in `config.run.dir`, without a receiver of events."""
    return Records(config, table, {ACTOR: prepared.policies[ACTOR].tokenizer}, Events())
