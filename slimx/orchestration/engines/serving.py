"""Engines of commands without trainers, `slimx generate` and `slimx eval`: they serve the weights that they start with,
as version 0."""

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
"""Number of threads that check the weight files of a directory. With a single thread, checking hundreds of GB would
take longer than starting the servers."""


@asynccontextmanager
async def serving(
    config: Config, sources: Sources, directory: Path, note: Callable[[str], None]
) -> AsyncIterator[EngineService]:
    """Starts all engines of `config`, and stops them when the `with` block ends. `config`: a result of
    `without_trainers` (slimx.orchestration.start.checks). Ray must be running.

    The directory `logs/` and the file `engines.json` are written into `directory`. `note` is called with a message
    about each engine event."""
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    async with EngineService(config, sources, directory, note=note) as service:
        (engines,) = service.place().values()
        check = partial(check_stored, config.model.path, config.rollout.policy_engines)
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


async def check_stored(model: str, groups: Iterable[Engines]) -> None:
    """Checks the safetensors files that the servers of `groups` load, while these servers start. A group loads the
    model that it names, or `model` if it names none. Raises SlimxError if a weight is NaN or infinite, because SGLang
    would serve such a weight without an error."""
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
    """Adds to the router every engine that has started but is not serving yet; each serves the weights that it loaded
    itself. Awaits `prepare` for each engine before adding it."""
    for engine in group.members.joining():
        with suppress(ReceiverLost):  # the engine was lost again, and may be restarted
            if prepare is not None:
                await prepare(engine)
            await group.members.admit(engine)


async def keep_admitting(group: EngineGroup, prepare: Callable[[EngineHandle], Awaitable[None]] | None = None) -> None:
    """Adds restarted engines to the router as `admit_joining` does. Returns when all engines are lost and none can be
    restarted; requests to the group then raise the error of the engine that was lost last."""
    with suppress(SlimxError):
        while True:
            await group.members.back()
            await admit_joining(group, prepare)
