"""Engines behind their router: created, started, put to sleep and ended together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import ray

from slimx.cluster.place import Placement
from slimx.cluster.restarts import Restart
from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.engines.fleet.actor import EngineActor
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.fleet.membership import Membership
from slimx.engines.fleet.nodes import share_of
from slimx.engines.server.configured import spec_values
from slimx.engines.server.keys import Keys, key_in
from slimx.engines.server.router import Router
from slimx.errors import SlimxError
from slimx.models.files.starting import start_deadline
from slimx.runtime.ports import free_port
from slimx.runtime.tasks import all_tried


def keys_of(group: Engines) -> Keys:
    """The keys that the servers of `group.urls` ask for. Raises SlimxError for a variable that is not set."""
    where = f"rollout.engines group {group.name}"
    return Keys(*(key_in(name, os.environ, where) for name in (group.api_key_env, group.admin_api_key_env)))


class EngineGroup:
    """Engines of one model, the router in front of them, and who of them takes part (`members`)."""

    def __init__(
        self,
        config: Config,
        device: str,
        log_dir: Path,
        *,
        moe: bool,
        note: Callable[[str], None] = lambda text: None,
        record: Callable[[Restart], None] = lambda restart: None,
        router: str = "router",
        groups: Sequence[Engines] | None = None,
        shared: Sequence[Placement] = (),
    ):
        """`note` is told in one line of every engine that is lost or started again, `record` of every restart.
        `router`: its name. `groups`: of `rollout.engines`, those of the policy by default. `shared`: the places of
        trainer ranks, one GPU each, with which engines take turns on CUDA; empty: they have GPUs of their own."""
        groups = config.rollout.policy_engines if groups is None else groups
        self.config, self.device, self.moe, self.frozen = config, device, moe, groups[0].frozen
        self.start_deadline_s = start_deadline(config, device)
        self._shared = list(shared)
        self.keys = Keys.random()
        """Keys of the router and of all servers that slimx starts."""
        self.engines = [self._create(group, number, log_dir) for group in groups for number in range(group.servers)]
        self.router = Router(
            free_port(),
            free_port(),
            log_dir / f"{router}.log",
            request_deadline_s=config.rollout.request_deadline,
            disaggregated=any(group.role != "regular" for group in groups),
            by_key=not self.frozen and config.rollout.affinity != "prefix",
            keys=self.keys,
        )
        self.members = Membership(
            self.engines,
            self.router,
            health=config.rollout.health,
            start_deadline_s=self.start_deadline_s,
            note=note,
            record=record,
        )

    def _create(self, group: Engines, number: int, log_dir: Path) -> EngineHandle:
        config, name = self.config, f"{group.name}-{number}"
        values = spec_values(config, group, name, device=self.device, moe=self.moe)
        keys = values["keys"] = keys_of(group) if group.urls else self.keys
        cpus = group.threads * group.ranks / group.nodes
        first, *others = self._places(group)
        options = first.options(cpus) if not group.urls else {"num_cpus": 0}
        actor = ray.remote(EngineActor).options(**options)
        log, deadline = log_dir / f"engine-{name}.log", config.publish.engine_deadline
        make = partial(
            actor.remote,
            values | {"gpus": first.gpus},
            str(log),
            deadline,
            network=config.cluster.network,
            others=tuple(others),
            url=group.urls[number] if group.urls else None,
            direct=config.publish.transport == "nixl" and not group.frozen,
            item=changes[0] if (changes := config.publish.changes_on_disk) and not group.frozen else None,
        )
        return EngineHandle(name, make, log, deadline, role=group.role, nodes=group.nodes, keys=keys)

    def _places(self, group: Engines) -> list[Placement]:
        """Placements of one server, machine by machine."""
        each = group.ranks // group.nodes
        if self.device != "cuda" or group.urls:
            return [Placement()] * group.nodes
        if not self._shared:
            return [Placement(owned=each)] * group.nodes
        taken, self._shared = self._shared[: group.ranks], self._shared[group.ranks :]
        return [share_of(taken[rank : rank + each], group.name) for rank in range(0, group.ranks, each)]

    async def start(self) -> None:
        """Start servers and router together. An engine is in the router only after its first publication."""
        limit = self.start_deadline_s
        self.router.start()
        await asyncio.gather(self.router.wait_ready(limit), *(engine.start(limit) for engine in self.engines))
        # A server that runs already refuses what is older than the publications of the run before.
        self.members.epoch = max(self.members.epoch, *(engine.epoch + 1 for engine in self.engines))

    async def interrupt(self) -> None:
        """End all requests now; each brings what it has. An engine that cannot is quarantined."""
        await asyncio.gather(*(self._or_quarantine(engine, engine.interrupt()) for engine in self.members.members()))

    async def sleep(self) -> None:
        """Release the memory of the engines' weights and KV cache: the trainers' turn begins. One that cannot is
        quarantined, and has ended when this returns; one that is being started is waited for, and sleeps too."""
        await self.members.turn.end()
        await asyncio.gather(*(self._or_quarantine(engine, engine.sleep()) for engine in self.members.candidates()))
        await self.members.turn.end()

    async def wake(self) -> None:
        """Have engines hold the memory of their weights alone, which a publication, which must follow, writes into. No
        engine starts until `members.turn` begins."""
        await self.members.turn.end()
        await asyncio.gather(*(self._or_quarantine(engine, engine.wake()) for engine in self.members.candidates()))

    async def _or_quarantine(self, engine: EngineHandle, work: Awaitable[None]) -> None:
        try:
            await work
        except SlimxError as error:
            await self.members.quarantine(engine, error)

    async def stop(self) -> None:
        """End router and servers, each with its whole tree; the first problem is raised after all have been tried."""
        await self.members.stop()
        await all_tried(self.router.stop(), *(engine.stop() for engine in self.engines))


def tell_restarts(groups: Sequence[EngineGroup], note: Callable[[str], None]) -> None:
    """Say at the end of a run what was started again in it, and why."""
    for group in groups:
        for restart in group.members.history():
            note(str(restart))
