"""Engines without trainers: what `slimx generate` and `slimx eval` start.

The servers keep the weights that they start with, and call them version 0."""

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
"""Threads that read the weights of a directory: servers of hundreds of GB must not wait for one."""


@asynccontextmanager
async def serving(
    config: Config, sources: Sources, directory: Path, note: Callable[[str], None]
) -> AsyncIterator[EngineService]:
    """All engines of `config` (see slimx.orchestration.start.checks), started, and ended afterwards. Ray is
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
            with frozen_heap():
                yield service
        finally:
            readmitting.cancel()
            with suppress(asyncio.CancelledError):
                await readmitting


async def _call_version_0(engine: EngineHandle) -> None:
    """Stamp what the server started with: tokens without a version are refused."""
    await engine.perform("stamp", None, "0")


async def check_stored(model: str, groups: Iterable[Engines]) -> None:
    """Read the safetensors files that servers of `groups` start from, of `model` where a group names no other, while
    these start. Raises SlimxError for weights that are NaN or infinite: SGLang answers with them all the same."""
    for path in sorted({Path(group.model or model) for group in groups if not group.urls}):
        if not (path / SINGLE).is_file() and not (path / INDEX).is_file():
            continue
        reader = CheckpointReader(path)
        names = iter(sorted(reader.names))
        await together([partial(_check, reader.reopened(), names) for _ in range(READING)])


async def _check(reader: CheckpointReader, names: Iterator[str]) -> None:
    for name in names:
        await asyncio.to_thread(reader.check_finite, name)


async def admit_joining(group: EngineGroup, prepare: Callable[[EngineHandle], Awaitable[None]] | None = None) -> None:
    """Let engines that have started serve what they started with. `prepare` is awaited for each before."""
    for engine in group.members.joining():
        with suppress(ReceiverLost):  # lost meanwhile: it comes back here if it may
            if prepare is not None:
                await prepare(engine)
            await group.members.admit(engine)


async def keep_admitting(group: EngineGroup, prepare: Callable[[EngineHandle], Awaitable[None]] | None = None) -> None:
    """Let engines that came back serve again. Ends when none is left: whoever asks this group is told so."""
    with suppress(SlimxError):
        while True:
            await group.members.back()
            await admit_joining(group, prepare)
