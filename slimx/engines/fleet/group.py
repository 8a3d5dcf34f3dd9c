"""Groups of engines that serve one model behind one router: starts and stops them, releases their memory while trainers
train, and records them in RUN/engines.json."""

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
"""Maximum number of restarts that engines.json lists for each engine and router; only the latest are listed."""


def keys_of(group: Engines) -> Keys:
    """Returns the keys of the external servers at `group.urls`, read from the environment variables that the group
    names. Raises SlimxError if one of these variables is not set."""
    api_key = key_in(group.api_key_env, os.environ, group.where)
    return Keys(api_key, key_in(group.admin_api_key_env, os.environ, group.where))


CALLS = 3
"""Maximum number of consecutive calls to a server within an operation that releases or restores its memory (pause,
release, resume). Each call has a separate deadline."""


class EngineGroup:
    """Engines that serve one model, the router in front of them, and the record of which engines currently serve
    (`members`)."""

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

        `moe`: True if the model has experts. `note`: called with a line of text for every lost or restarted engine.
        `record`: called with every restart. `router`: name of the router. `groups`: groups of `rollout.engines` to
        create engines for; None selects the policy's groups. `shared`: placements of trainer ranks, one GPU each, whose
        GPUs the engines use alternately with the trainers; empty if no GPUs are shared."""
        groups = groups or config.served.sampling
        self.config = config
        self.device = device
        self.moe = moe
        self.frozen = groups[0].frozen
        self.start_deadline_s = start_deadline(config, device)
        self._shared = list(shared)
        self.keys = Keys.random()
        """Keys of the router and of all servers that slimx starts."""
        self.engines = [self._create(group, index, log_dir) for group in groups for index in range(group.servers)]
        self.receivers = [*self.engines]
        """Engines to which the transport brings weights: these, and evaluation engines."""
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
                raise ValueError(f"the server URL {group.urls[index]} lacks a host or a port; write http://HOST:PORT")
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
        """Returns the placements of one server of `group`, one per node. They are taken from the GPUs that are shared
        with trainers, if there are any."""
        per_node = group.ranks // group.nodes
        if self.device != "cuda" or group.urls:
            return [Placement()] * group.nodes
        if not self._shared:
            return [Placement(owned=per_node)] * group.nodes
        ranks = self._shared[: group.ranks]
        self._shared = self._shared[group.ranks :]
        return [placement_of(ranks[start : start + per_node], group.name) for start in range(0, group.ranks, per_node)]

    async def start(self) -> None:
        """Starts servers and router concurrently. An engine is added to the router only after its first publication."""
        limit = self.start_deadline_s
        self.router.start()
        await asyncio.gather(self.router.wait_ready(limit), *(engine.start(limit) for engine in self.engines))
        # An external server refuses membership epochs that earlier runs have used.
        for engine in self.engines:
            for rank in engine.attestation:
                self.members.epoch = max(self.members.epoch, rank["epoch"] + 1)

    async def interrupt(self) -> None:
        """Aborts all running requests; each returns the tokens generated so far. An engine that fails to abort them is
        quarantined."""
        await self._perform(self.members.members(), "interrupt")

    async def sleep(self) -> None:
        """Releases the memory of the engines' weights and KV cache, so that trainers can use the devices.

        An engine that fails to do so is quarantined; its processes have ended by the time this method returns. An
        engine that is still starting releases its memory once it has started."""
        await self.members.engine_phase.end()
        await self._perform(self.members.candidates(), "sleep")
        await self.members.engine_phase.end()

    async def wake(self) -> None:
        """Reallocates the memory of the engines' weights, without values, so a publication must follow.

        From now on, no lost engine is restarted until `members.engine_phase.begin` is called, because trainers use the
        devices until then.
        """
        await self.members.engine_phase.end()
        await self._perform(self.members.candidates(), "hold_weights")

    async def _perform(self, engines: Sequence[EngineHandle], method: str) -> None:
        """Calls `method` on all `engines` concurrently, and quarantines those that raise an error."""

        async def tried(engine: EngineHandle) -> None:
            try:
                await engine.perform(method, None, deadline_s=CALLS * engine.deadline_s)
            except SlimxError as error:
                await self.members.quarantine(engine, error)

        await asyncio.gather(*map(tried, engines))

    async def stop(self) -> None:
        """Stops the router and all servers with their process trees. If stopping one of them fails, the error is raised
        after the others have been stopped."""
        await self.members.stop()
        await all_tried(self.router.stop(), *(engine.stop() for engine in self.engines))


def note_restarts(groups: Sequence[EngineGroup], note: Callable[[str], None]) -> None:
    """Reports all restarts of engines and routers in this run, with their reasons, to `note`; called when the run
    ends."""
    for group in groups:
        for restart in group.members.history():
            note(str(restart))


def placement_of(ranks: Sequence[Placement], name: str) -> Placement:
    """Returns the placement of one node's part of a server, on the GPUs of the given trainer ranks.

    `name`: name of the group in rollout.engines, for messages. Raises SlimxError if the GPUs are on several nodes."""
    nodes = {place.node for place in ranks}
    if len(nodes) > 1:
        raise SlimxError(
            f"rollout.engines group {name}: the GPUs of {len(ranks)} trainer ranks must be on one node, but are on "
            f"{len(nodes)}; set tensor, pipeline and nodes so that tensor x pipeline / nodes divides the number of "
            "GPUs per node",
            code="engines.shared_gpus",
            about=name,
        )
    return Placement(nodes.pop(), tuple(gpu for place in ranks for gpu in place.gpus or ()))


def follow(groups: Sequence[EngineGroup], path: Path) -> None:
    """Writes the address and state of every engine and router of `groups` to `path` (RUN/engines.json), immediately and
    again after every change. `slimx status` reads the file."""

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
    """Returns an engine's entry for engines.json. `frozen`: True if the engine's weights are not trained."""
    return {
        "name": engine.name,
        "role": engine.spec.role,
        "frozen": frozen,
        "nodes": engine.nodes,
        "url": engine.url,
        "standing": str(engine.state),
        **_restarts(restarts),
    }


def _router_entry(router: Router, keeper: RouterKeeper) -> Json:
    """Returns a router's entry for engines.json."""
    return {"name": router.process.name, "url": router.url, "up": keeper.up, **_restarts(keeper.restarts)}


def _restarts(restarts: Restarts) -> Json:
    """Returns the number of restarts of an engine or router, and the last `KEPT` of these restarts, for
    engines.json."""
    history = [asdict(restart) for restart in restarts.history[-KEPT:]]
    return {"restarts": len(restarts.history), "history": history}
