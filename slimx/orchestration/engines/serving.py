"""Engines that serve the weights that they start with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from slimx.config.sections.engines import Engines
from slimx.engines.fleet.group import EngineGroup
from slimx.engines.fleet.handle import EngineHandle
from slimx.errors import SlimxError
from slimx.models.files.index import INDEX, SINGLE
from slimx.models.files.reader import CheckpointReader
from slimx.orchestration.lifetime.lifetime import together
from slimx.reshard.parties import ReceiverLost

READING = 8
"""Number of threads that check the weight files of a directory. With a single thread, checking hundreds of GB would
take longer than starting the servers."""


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
