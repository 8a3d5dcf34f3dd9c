"""Engines of frozen models (judges, reward models, teachers), with a separate router for each group.

Engines join the router of their group when they start, without waiting for a weight publication, and rejoin it after a
restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slimx.cluster.restarts import Restart
from slimx.config.schema import Config
from slimx.engines.fleet.group import EngineGroup, keys_of
from slimx.engines.fleet.membership import Membership
from slimx.engines.server.keys import Keys
from slimx.extras.served_models.client import FrozenEngine, image_placeholder
from slimx.extras.served_models.teacher import check_vocabulary, make_scorer
from slimx.orchestration.engines.service import FrozenEngines
from slimx.orchestration.engines.serving import admit_joining, check_stored, keep_admitting
from slimx.orchestration.lifetime.lifetime import together
from slimx.rollout.flow.rollouts import Score
from slimx.runtime.tasks import all_tried, cancelled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ServedModels(FrozenEngines):
    """Groups of frozen engines, together with their routers."""

    def __init__(
        self,
        config: Config,
        device: str,
        log_dir: Path,
        *,
        note: Callable[[str], None],
        record: Callable[[Restart], None] = lambda restart: None,
    ):
        """Creates the groups without starting servers.

        `device`: device on which engines run. `log_dir`: directory for the servers' logs. `note`: function that is
        called with a line of text about every lost or restarted engine. `record`: function that is called with every
        restart.
        """
        super().__init__(config)
        self.groups: dict[str, EngineGroup] = {}
        for group in config.served.frozen:
            self.groups[group.name] = EngineGroup(
                config,
                device,
                log_dir,
                moe=False,
                note=note,
                record=record,
                router=f"router-{group.name}",
                groups=(group,),
            )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts all servers and their routers, waits until they respond, and starts monitoring them."""
        check = partial(check_stored, self.config.model.path, self.config.served.frozen)
        await together([check, *(group.start for group in self.groups.values())])
        for name, group in self.groups.items():
            await admit_joining(group)
            group.members.watch()
            self._tasks.append(asyncio.create_task(keep_admitting(group)))
            self.clients[name] = self._client(name, group.router.url, group.keys, group.members)

    async def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises SlimxError if the vocabulary of a teacher on an external server differs from the policy's."""
        for group in self.config.served.frozen:
            if group.name not in self.config.algorithm.served_teachers:
                continue
            for url in group.urls:
                await check_vocabulary(self._client(group.name, url, keys_of(group)), tokenizer)

    def scorer(self) -> Score | None:
        return make_scorer(self.config, self.clients)

    def _client(self, name: str, url: str, keys: Keys, members: Membership | None = None) -> FrozenEngine:
        """Returns a client for `url`, the router of the engines in `members`; if `members` is None, `url` is a server
        that slimx does not monitor."""
        rollout = self.config.rollout
        client = partial(
            FrozenEngine,
            name,
            url,
            api_key=keys.api_key,
            deadline_s=rollout.request_deadline,
            retries=rollout.request_retries,
            placeholder=image_placeholder(self.config),
        )
        if members is None:
            return client()
        return client(look=members.look, failure=members.failure, outage=members.outage)

    def metrics(self) -> dict[str, float]:
        """Returns `engines/GROUP/serving` and the other metrics of each group."""
        metrics: dict[str, float] = {}
        for name, group in self.groups.items():
            for key, value in group.members.metrics().items():
                metrics[f"engines/{name}/{key.removeprefix('engines/')}"] = value
        return metrics

    async def stop(self) -> None:
        """Stops the routers and the servers that slimx started; external servers keep running."""
        await cancelled(*self._tasks)
        await all_tried(*(group.stop() for group in self.groups.values()))
