"""Engines without trainers, for `slimx generate` and `slimx eval`.

The servers keep their initial weights as version 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.config.sections.policies import ACTOR
from slimx.engines.fleet.group import EngineGroup
from slimx.engines.fleet.handle import EngineHandle
from slimx.errors import SlimxError
from slimx.layout.ranks import sizes_of
from slimx.models.files.index import INDEX, SINGLE
from slimx.models.files.reader import CheckpointReader
from slimx.orchestration.batches import longest_trajectory
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.lifetime.garbage import frozen_heap
from slimx.orchestration.lifetime.lifetime import together
from slimx.orchestration.start.prepare import Sources
from slimx.reshard.parties import ReceiverLost

READING = 8
"""Threads that read weights from a directory: one thread would delay servers of hundreds of GB."""


@asynccontextmanager
async def serving(
    config: Config, sources: Sources, directory: Path, note: Callable[[str], None]
) -> AsyncIterator[EngineService]:
    """Starts all engines of `config` (see slimx.orchestration.start.checks) and stops them after the block. Ray must be
    running.

    `directory` gets `logs/` and `engines.json`. `note` gets a line per event of an engine."""
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    async with EngineService(config, sources, directory, note=note) as service:
        (engines,) = service.place().values()
        check = partial(check_stored, config.model.path, config.rollout.policy_engines)
        await together([service.frozen.start, engines.start, check])
        # The same length that training with this configuration allows.
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
    """Stamps the server's weights with version 0: tokens without a version are refused."""
    await engine.perform("stamp", None, "0")


async def check_stored(model: str, groups: Iterable[Engines]) -> None:
    """Checks the safetensors files that servers of `groups` start from, by default those of `model`, while they start.
    Raises SlimxError for weights that are NaN or infinite: SGLang would serve them without an error."""
    directories = set()
    for group in groups:
        if not group.urls:
            directories.add(Path(group.model or model))
    for path in sorted(directories):
        if not (path / SINGLE).is_file() and not (path / INDEX).is_file():
            continue
        reader = CheckpointReader(path)
        names = iter(sorted(reader.names))
        await together([partial(_check, reader.reopened(), names) for _ in range(READING)])


async def _check(reader: CheckpointReader, names: Iterator[str]) -> None:
    for name in names:
        await asyncio.to_thread(reader.check_finite, name)


async def admit_joining(group: EngineGroup, prepare: Callable[[EngineHandle], Awaitable[None]] | None = None) -> None:
    """Admits started engines with the weights they started with. `prepare` is awaited for each before."""
    for engine in group.members.joining():
        with suppress(ReceiverLost):  # lost again; it may come back
            if prepare is not None:
                await prepare(engine)
            await group.members.admit(engine)


async def keep_admitting(group: EngineGroup, prepare: Callable[[EngineHandle], Awaitable[None]] | None = None) -> None:
    """Admits engines that come back. Ends when none is left: requests to the group then raise the error."""
    with suppress(SlimxError):
        while True:
            await group.members.back()
            await admit_joining(group, prepare)
