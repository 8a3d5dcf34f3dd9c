"""Engines behind their router: created, started, put to sleep, ended, and noted in RUN/engines.json together."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

from slimx.cluster.place import Placement
from slimx.cluster.restarts import Restart, Restarts
from slimx.cluster.starting import start_deadline
from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.durable import write_atomic
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.fleet.membership import Membership
from slimx.engines.server.engine import Engine
from slimx.engines.server.keys import Keys, key_in
from slimx.engines.server.router import Router
from slimx.engines.server.spec import engine_spec
from slimx.engines.transport import transport_of
from slimx.errors import SlimxError
from slimx.runtime.ports import free_port
from slimx.runtime.tasks import all_tried

KEPT = 5
"""Restarts of each part that engines.json lists."""


def keys_of(group: Engines) -> Keys:
    """The keys that the servers of `group.urls` ask for. Raises SlimxError for a variable that is not set."""
    where = f"rollout.engines group {group.name}"
    return Keys(*(key_in(name, os.environ, where) for name in (group.api_key_env, group.admin_api_key_env)))


CALLS = 3
"""Calls to a server, each with a deadline, of which a turn's change is made at most: pause, release, resume."""


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
        first, *others = self._places(group)
        spec = engine_spec(config, group, name, device=self.device, moe=self.moe)
        spec = replace(spec, gpus=first.gpus, keys=keys_of(group) if group.urls else self.keys)
        if group.urls:
            where = urlsplit(group.urls[number])
            spec = replace(spec, host=where.hostname, port=where.port, external=True)
        options = {"num_cpus": 0} if group.urls else first.options(spec.threads * group.ranks / group.nodes)
        log, deadline = log_dir / f"engine-{name}.log", config.publish.engine_deadline
        make = partial(
            ray.remote(Engine).options(**options).remote,
            spec,
            log,
            deadline,
            network=config.cluster.network,
            places=others,
            make_end=None if group.frozen else transport_of(config.publish).end(config.publish),
        )
        return EngineHandle(spec, make, log, deadline, nodes=group.nodes)

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
        ranks = [rank for engine in self.engines for rank in engine.attestation]
        self.members.epoch = max([self.members.epoch, *(rank["epoch"] + 1 for rank in ranks)])

    async def interrupt(self) -> None:
        """End all requests now; each brings what it has. An engine that cannot is quarantined."""
        await self._each(self.members.members(), "interrupt")

    async def sleep(self) -> None:
        """Release the memory of the engines' weights and KV cache: the trainers' turn begins. One that cannot is
        quarantined, and has ended when this returns; one that is being started is waited for, and sleeps too."""
        await self.members.turn.end()
        await self._each(self.members.candidates(), "sleep")
        await self.members.turn.end()

    async def wake(self) -> None:
        """Have engines hold the memory of their weights alone, which a publication, which must follow, writes into. No
        engine starts until `members.turn` begins."""
        await self.members.turn.end()
        await self._each(self.members.candidates(), "hold_weights")

    async def _each(self, engines: Sequence[EngineHandle], method: str) -> None:
        """Have each of `engines` do the same; one that cannot is quarantined."""

        async def tried(engine: EngineHandle) -> None:
            try:
                await engine.perform(method, None, deadline_s=CALLS * engine.deadline_s)
            except SlimxError as error:
                await self.members.quarantine(engine, error)

        await asyncio.gather(*map(tried, engines))

    async def stop(self) -> None:
        """End router and servers, each with its whole tree; the first problem is raised after all have been tried."""
        await self.members.stop()
        await all_tried(self.router.stop(), *(engine.stop() for engine in self.engines))


def tell_restarts(groups: Sequence[EngineGroup], note: Callable[[str], None]) -> None:
    """Say at the end of a run what was started again in it, and why."""
    for group in groups:
        for restart in group.members.history():
            note(str(restart))


def share_of(ranks: Sequence[Placement], name: str) -> Placement:
    """The place of a server's share that takes turns with trainer `ranks`, one GPU each. Raises SlimxError if they are
    not on one machine."""
    nodes = {place.node for place in ranks}
    if len(nodes) > 1:
        raise SlimxError(
            f"{len(ranks)} consecutive trainer ranks, whose GPUs a server of rollout.engines group {name} shares, are "
            f"on {len(nodes)} machines; make the ranks of a machine's share (tensor x pipeline / nodes) divide its "
            "GPUs",
            code="engines.shared_gpus",
            about=name,
        )
    return Placement(nodes.pop(), tuple(gpu for place in ranks for gpu in place.gpus or ()))


def follow(groups: Sequence[EngineGroup], path: Path) -> None:
    """Write every engine of `groups`, where it is and what it is to the run now, to RUN/engines.json, now and anew with
    every change; for `slimx status`."""

    def write() -> None:
        engines = [
            {
                "name": engine.name,
                "role": engine.spec.role,
                "frozen": group.frozen,
                "nodes": engine.nodes,
                "url": engine.url,
                "standing": str(engine.standing),
                **_restarts(group.members.restarts[engine.name]),
            }
            for group in groups
            for engine in group.engines
        ]
        routers = [
            {
                "name": group.router.process.name,
                "url": group.router.url,
                "up": group.members.keeper.up,
                **_restarts(group.members.keeper.restarts),
            }
            for group in groups
        ]
        text = json.dumps({"engines": engines, "routers": routers}, indent=1)
        write_atomic(path, text.encode(), sync=False)

    for group in groups:
        group.members.on_change = write
    write()


def _restarts(restarts: Restarts) -> dict[str, Any]:
    """Number of a part's restarts, and the last of them."""
    return {"restarts": len(restarts.history), "history": [asdict(each) for each in restarts.history[-KEPT:]]}
