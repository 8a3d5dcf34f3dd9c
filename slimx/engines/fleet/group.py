"""Engines of one model behind their router: created, started, put to sleep, stopped and recorded in
RUN/engines.json."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
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
from slimx.engines.fleet.router_keeper import RouterKeeper
from slimx.engines.server.engine import Engine
from slimx.engines.server.keys import Keys, key_in
from slimx.engines.server.router import Router
from slimx.engines.server.spec import engine_spec
from slimx.engines.transport import transport_of
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.runtime.ports import free_port
from slimx.runtime.tasks import all_tried

KEPT = 5
"""Number of restarts of each part listed in engines.json."""


def keys_of(group: Engines) -> Keys:
    """Returns the keys of the servers at `group.urls`. Raises SlimxError for an environment variable that is not
    set."""
    where = f"rollout.engines group {group.name}"
    api_key = key_in(group.api_key_env, os.environ, where)
    return Keys(api_key, key_in(group.admin_api_key_env, os.environ, where))


CALLS = 3
"""Maximum number of calls to a server, each with a deadline, per change of turn: pause, release, resume."""


class EngineGroup:
    """Engines of one model, the router in front of them, and their membership (`members`)."""

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
        """Creates the engines' actors and the router without starting servers.

        `note` receives a line for every lost or restarted engine, `record` every restart. `router`: name of the router.
        `groups`: groups of `rollout.engines`; default: those of the policy. `shared`: placements of trainer ranks, one
        GPU each, that engines share by turns on CUDA; empty: engines have separate GPUs.
        """
        groups = config.rollout.policy_engines if groups is None else groups
        self.config = config
        self.device = device
        self.moe = moe
        self.frozen = groups[0].frozen
        self.start_deadline_s = start_deadline(config, device)
        self._shared = list(shared)
        self.keys = Keys.random()
        """Keys of the router and of all servers started by slimx."""
        self.engines = [self._create(group, index, log_dir) for group in groups for index in range(group.servers)]
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

    def _create(self, group: Engines, index: int, log_dir: Path) -> EngineHandle:
        config = self.config
        name = f"{group.name}-{index}"
        first, *others = self._places(group)
        spec = engine_spec(config, group, name, device=self.device, moe=self.moe)
        spec = replace(spec, gpus=first.gpus, keys=keys_of(group) if group.urls else self.keys)
        if group.urls:
            address = urlsplit(group.urls[index])
            if address.hostname is None or address.port is None:
                raise ValueError(f"{group.urls[index]} has no host and port")
            spec = replace(spec, host=address.hostname, port=address.port, external=True)
        options = {"num_cpus": 0} if group.urls else first.options(spec.threads * group.ranks / group.nodes)
        log = log_dir / f"engine-{name}.log"
        deadline = config.publish.engine_deadline
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
        """Returns the placements of one server, node by node."""
        per_node = group.ranks // group.nodes
        if self.device != "cuda" or group.urls:
            return [Placement()] * group.nodes
        if not self._shared:
            return [Placement(owned=per_node)] * group.nodes
        ranks = self._shared[: group.ranks]
        self._shared = self._shared[group.ranks :]
        return [placement_of(ranks[start : start + per_node], group.name) for start in range(0, group.ranks, per_node)]

    async def start(self) -> None:
        """Starts servers and router concurrently. An engine joins the router only after its first publication."""
        limit = self.start_deadline_s
        self.router.start()
        await asyncio.gather(self.router.wait_ready(limit), *(engine.start(limit) for engine in self.engines))
        # An external server refuses epochs that are not newer than those of earlier runs.
        for engine in self.engines:
            for rank in engine.attestation:
                self.members.epoch = max(self.members.epoch, rank["epoch"] + 1)

    async def interrupt(self) -> None:
        """Aborts all requests; each returns its tokens so far. Quarantines an engine that fails to."""
        await self._perform(self.members.members(), "interrupt")

    async def sleep(self) -> None:
        """Releases the memory of the engines' weights and KV cache for the trainers' turn. An engine that fails to is
        quarantined and has ended when this returns; one that is being started is awaited and sleeps too."""
        await self.members.turn.end()
        await self._perform(self.members.candidates(), "sleep")
        await self.members.turn.end()

    async def wake(self) -> None:
        """Restores the memory of the engines' weights, without values: a publication must follow. No engine starts
        until `members.turn` begins."""
        await self.members.turn.end()
        await self._perform(self.members.candidates(), "hold_weights")

    async def _perform(self, engines: Sequence[EngineHandle], method: str) -> None:
        """Calls `method` on all `engines` concurrently. Quarantines those that fail."""

        async def tried(engine: EngineHandle) -> None:
            try:
                await engine.perform(method, None, deadline_s=CALLS * engine.deadline_s)
            except SlimxError as error:
                await self.members.quarantine(engine, error)

        await asyncio.gather(*map(tried, engines))

    async def stop(self) -> None:
        """Ends router and servers with their process trees. Tries all of them before it raises the first error."""
        await self.members.stop()
        await all_tried(self.router.stop(), *(engine.stop() for engine in self.engines))


def note_restarts(groups: Sequence[EngineGroup], note: Callable[[str], None]) -> None:
    """Notes at the end of a run the restarts in it with their reasons."""
    for group in groups:
        for restart in group.members.history():
            note(str(restart))


def placement_of(ranks: Sequence[Placement], name: str) -> Placement:
    """Returns the placement of a server's part on the GPUs of trainer `ranks`, one each. Raises SlimxError if they are
    on several nodes."""
    nodes = {place.node for place in ranks}
    if len(nodes) > 1:
        raise SlimxError(
            f"the GPUs of {len(ranks)} consecutive trainer ranks, shared by a server of rollout.engines group "
            f"{name}, are on {len(nodes)} nodes; make the server's ranks per node (tensor x pipeline / nodes) divide "
            "the GPUs of a node",
            code="engines.shared_gpus",
            about=name,
        )
    return Placement(nodes.pop(), tuple(gpu for place in ranks for gpu in place.gpus or ()))


def follow(groups: Sequence[EngineGroup], path: Path) -> None:
    """Writes address and standing of every engine of `groups` to RUN/engines.json, now and after every change, for
    `slimx status`."""

    def write() -> None:
        engines = [
            _engine_entry(engine, group.frozen, group.members.restarts[engine.name])
            for group in groups
            for engine in group.engines
        ]
        routers = [_router_entry(group.router, group.members.keeper) for group in groups]
        text = json.dumps({"engines": engines, "routers": routers}, indent=1)
        write_atomic(path, text.encode(), sync=False)

    for group in groups:
        group.members.on_change = write
    write()


def _engine_entry(engine: EngineHandle, frozen: bool, restarts: Restarts) -> Json:
    """Returns the entry of an engine in engines.json."""
    return {
        "name": engine.name,
        "role": engine.spec.role,
        "frozen": frozen,
        "nodes": engine.nodes,
        "url": engine.url,
        "standing": str(engine.standing),
        **_restarts(restarts),
    }


def _router_entry(router: Router, keeper: RouterKeeper) -> Json:
    """Returns the entry of a router in engines.json."""
    return {"name": router.process.name, "url": router.url, "up": keeper.up, **_restarts(keeper.restarts)}


def _restarts(restarts: Restarts) -> Json:
    """Returns the number of a part's restarts and the last of them."""
    history = [asdict(restart) for restart in restarts.history[-KEPT:]]
    return {"restarts": len(restarts.history), "history": history}
