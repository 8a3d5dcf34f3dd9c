"""Engines without trainers: what `slimx generate` and `slimx eval` start.

The servers keep the weights that they start with, and call them version 0."""

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
from slimx.orchestration.engines.frozen import admit_joining, check_stored, keep_admitting
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.lifetime.heap import settled_heap
from slimx.orchestration.lifetime.lifetime import together
from slimx.orchestration.start.prepare import Sources


@asynccontextmanager
async def serving(
    config: Config, sources: Sources, directory: Path, note: Callable[[str], None]
) -> AsyncIterator[EngineService]:
    """All engines of `config` (see slimx.orchestration.start.early), started, and ended afterwards. Ray is
    there already.

    `directory`: gets `logs/` and `engines.json`. `note` is told in one line what happens to engines."""
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    async with EngineService(config, sources, directory, note=note) as service:
        (engines,) = service.place().values()
        check = partial(check_stored, config.model.path, config.rollout.policy_engines)
        await together([service.frozen.start, engines.start, check])
        # As long as what training on the same configuration could take.
        await service.open(longest_trajectory(config, sources.policies[ACTOR].spec, sizes_of(config.trainer)))
        await admit_joining(engines, _call_version_0)
        engines.members.watch()
        readmitting = asyncio.create_task(keep_admitting(engines, _call_version_0))
        try:
            with settled_heap():
                yield service
        finally:
            readmitting.cancel()
            with suppress(asyncio.CancelledError):
                await readmitting


async def _call_version_0(engine: EngineHandle) -> None:
    """Stamp what the server started with: tokens without a version are refused."""
    await engine.perform("stamp", None, "0")
