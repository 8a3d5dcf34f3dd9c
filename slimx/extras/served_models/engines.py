"""Models that are never published to, each group behind a router of its own: judges, reward models, teachers.

They join their router when they have started, not after a publication, and come back by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from slimx.cluster.restarts import Restart
from slimx.config.schema import Config
from slimx.engines.fleet.group import EngineGroup, keys_of
from slimx.engines.fleet.membership import Membership
from slimx.engines.server.keys import Keys
from slimx.extras.served_models.client import FrozenEngine
from slimx.extras.served_models.teacher import check_vocabulary, make_scorer
from slimx.orchestration.engines.service import FrozenEngines
from slimx.orchestration.engines.serving import admit_joining, check_stored, keep_admitting
from slimx.orchestration.lifetime.lifetime import together
from slimx.rollout.flow.rollouts import Score
from slimx.runtime.tasks import all_tried, cancelled


class ServedModels(FrozenEngines):
    """Frozen groups behind their routers."""

    def __init__(
        self,
        config: Config,
        device: str,
        log_dir: Path,
        *,
        note: Callable[[str], None],
        record: Callable[[Restart], None] = lambda restart: None,
    ):
        """`note` takes one line about every engine that is lost or started again, `record` every restart."""
        super().__init__(config)
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

    async def check(self, tokenizer: Any) -> None:
        """Compare the vocabulary of teachers' servers that ran before with the policy's; raises SlimxError."""
        for group in self.config.rollout.frozen_engines:
            for url in group.urls if group.name in self.config.algorithm.served_teachers else ():
                await check_vocabulary(self._client(group.name, url, keys_of(group)), tokenizer)

    def scorer(self) -> Score | None:
        return make_scorer(self.config, self.clients)

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
