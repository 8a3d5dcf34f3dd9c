"""Models that are never published to, each group behind a router of its own: judges, reward models, teachers.

They join their router when they have started, not after a publication, and come back by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from slimx.cluster.restarts import Restart
from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.engines.fleet.group import EngineGroup, keys_of
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.fleet.membership import Membership
from slimx.engines.server.keys import Keys
from slimx.errors import SlimxError
from slimx.models.files.index import INDEX, SINGLE
from slimx.models.files.reader import CheckpointReader
from slimx.orchestration.lifetime.lifetime import together
from slimx.reshard.parties import ReceiverLost
from slimx.rollout.client.frozen import FrozenEngine
from slimx.rollout.client.teacher import check_vocabulary
from slimx.runtime.tasks import all_tried, cancelled

READING = 8
"""Threads that read the weights of a directory: servers of hundreds of GB must not wait for one."""


class FrozenEngines:
    """The frozen groups of `rollout.engines`, and what hooks reach them by (`clients`, by group name)."""

    def __init__(
        self,
        config: Config,
        device: str,
        log_dir: Path,
        *,
        note: Callable[[str], None],
        record: Callable[[Restart], None] = lambda restart: None,
    ):
        """`note` is told in one line of every engine that is lost or started again, `record` of every restart."""
        self.config = config
        self.groups = {
            group.name: EngineGroup(
                config,
                device,
                log_dir,
                moe=False,
                note=note,
                record=record,
                router=f"router-{group.name}",
                groups=(group,),
            )
            for group in config.rollout.frozen_engines
        }
        self.clients: dict[str, FrozenEngine] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all servers; they answer when this returns, and are watched from then on."""
        check = partial(check_stored, self.config.model.path, self.config.rollout.frozen_engines)
        await together([check, *(group.start for group in self.groups.values())])
        for name, group in self.groups.items():
            await admit_joining(group)
            group.members.watch()
            self._tasks.append(asyncio.create_task(keep_admitting(group)))
            self.clients[name] = self._client(name, group.router.url, group.keys, group.members)

    async def check_teacher(self, tokenizer: Any) -> None:
        """Compare the vocabulary of teachers' servers that ran before with the policy's; raises SlimxError."""
        for group in self.config.rollout.frozen_engines:
            for url in group.urls if group.name in self.config.algorithm.served_teachers else ():
                await check_vocabulary(self._client(group.name, url, keys_of(group)), tokenizer)

    def _client(self, name: str, url: str, keys: Keys, members: Membership | None = None) -> FrozenEngine:
        """The client of a router, with the `members` behind it, or of a server that nobody watches."""
        rollout, watched = self.config.rollout, {}
        if members is not None:
            watched = {"look": members.look, "failure": members.failure, "outage": members.outage}
        limits = {"deadline_s": rollout.request_deadline, "retries": rollout.request_retries}
        return FrozenEngine(name, url, api_key=keys.api_key, **limits, **watched)

    def metrics(self) -> dict[str, float]:
        """`engines/GROUP/serving` and the like."""
        return {
            f"engines/{name}/{key.removeprefix('engines/')}": value
            for name, group in self.groups.items()
            for key, value in group.members.metrics().items()
        }

    async def stop(self) -> None:
        """End routers and servers; servers that run elsewhere are left alone."""
        await cancelled(*self._tasks)
        await all_tried(*(group.stop() for group in self.groups.values()))


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
        with contextlib.suppress(ReceiverLost):  # lost meanwhile: it comes back here if it may
            if prepare is not None:
                await prepare(engine)
            await group.members.admit(engine)


async def keep_admitting(group: EngineGroup, prepare: Callable[[EngineHandle], Awaitable[None]] | None = None) -> None:
    """Let engines that came back serve again. Ends when none is left: whoever asks this group is told so."""
    with contextlib.suppress(SlimxError):
        while True:
            await group.members.back()
            await admit_joining(group, prepare)
