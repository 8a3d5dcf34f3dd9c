"""Engines of commands without trainers, such as `slimx generate`: they serve the weights that they start with, as
version 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.engines.fleet.handle import EngineHandle
from slimx.layout.ranks import sizes_of
from slimx.orchestration.batches import longest_trajectory
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.engines.serving import admit_joining, check_stored, keep_admitting
from slimx.orchestration.lifetime.garbage import frozen_heap
from slimx.orchestration.lifetime.lifetime import together
from slimx.orchestration.start.prepare import Sources


@asynccontextmanager
async def serving(
    config: Config, sources: Sources, directory: Path, note: Callable[[str], None]
) -> AsyncIterator[EngineService]:
    """Starts all engines of `config`, and stops them when the `with` block ends. `config`: a result of
    `without_trainers` (slimx.extras.generation.checks). Ray must be running.

    The directory `logs/` and the file `engines.json` are written into `directory`. `note` is called with a message
    about each engine event."""
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    async with EngineService(config, sources, directory, note=note) as service:
        (engines,) = service.place().values()
        check = partial(check_stored, config.model.path, config.served.policy)
        await together([service.frozen.start, engines.start, check])
        # The maximum length of a trajectory is the same as in training with this configuration.
        await service.open(longest_trajectory(config, sources.policies[ACTOR].spec, sizes_of(config.trainer)))
        await admit_joining(engines, _stamp_version_0)
        engines.members.watch()
        readmitting = asyncio.create_task(keep_admitting(engines, _stamp_version_0))
        try:
            with frozen_heap():
                yield service
        finally:
            readmitting.cancel()
            with suppress(asyncio.CancelledError):
                await readmitting


async def _stamp_version_0(engine: EngineHandle) -> None:
    """Sets the version of the weights on a server to 0, because clients refuse tokens that a server reports without a
    version."""
    await engine.perform("stamp", None, "0")
