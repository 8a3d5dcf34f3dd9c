"""Puts engines, client, proxy, frozen engines and roster together: whatever answers the rollouts of a command.

GroupMaker --> GenerationClient --> router --> policy engines    (trained, or fixed at the weights they start with;
    |                                                             a client, a router and engines for each policy)
    |--------> FrozenEngine ------> router --> frozen engines    (judges, reward models, teachers)
    |--------> ChatProxy <--------- agents
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from slimx import entry_points
from slimx.cluster.connection import device_of
from slimx.cluster.place import Placement, place_among, place_of
from slimx.cluster.restarts import Restart
from slimx.cluster.waiting import gather
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.config.sections.rollout import Proxy
from slimx.engines.fleet.group import EngineGroup, follow, tell_restarts
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.outage import Outages
from slimx.errors import SlimxError
from slimx.orchestration.lifetime.hangs import keep_stacks
from slimx.orchestration.lifetime.lifetime import stopping
from slimx.orchestration.ranks.group import RankGroup
from slimx.orchestration.start.prepare import Sources
from slimx.reshard.packed import PUBLISHER
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.rollouts import GroupMaker, Score, Speaker
from slimx.rollout.hooks import AgentServer
from slimx.runtime.tasks import while_served

FROZEN = "slimx.frozen_engines"
"""Entry points: classes derived from `FrozenEngines`, made with the arguments of
`slimx.engines.fleet.group.EngineGroup` that all groups share."""


class FrozenEngines:
    """Frozen groups of `rollout.engines`, models that are never published to: none."""

    def __init__(self, config: Config):
        self.config = config
        self.groups: dict[str, EngineGroup] = {}
        self.clients: dict[str, Any] = {}
        """Clients by group, which hooks ask."""

    async def start(self) -> None:
        """Start all servers; they answer when this returns, and are watched from then on."""

    async def check(self, tokenizer: Any) -> None:
        """Raise SlimxError for a started model that cannot do its work beside a policy with `tokenizer`."""

    def scorer(self) -> Score | None:
        """Return what scores finished rollouts; None: nothing does."""
        return None

    def metrics(self) -> dict[str, float]:
        """Return `engines/GROUP/serving` and the like."""
        return {}

    async def stop(self) -> None:
        """End routers and servers; servers that run elsewhere are left alone."""


class EngineService:
    """The engines of a command and everything in front of them.

        async with EngineService(...) as service:
            groups = service.place()
            await together([service.frozen.start, *(engines.start for engines in groups.values())])
            await service.open(context)
            maker = service.make_maker()

    Leaving the block ends everything in the reverse order; a failure to stop does not hide the error that ended the
    block."""

    def __init__(
        self,
        config: Config,
        sources: Sources,
        directory: Path,
        *,
        note: Callable[[str], None],
        record: Callable[[Restart], None] = lambda restart: None,
        lost: Callable[[str, SlimxError], None] = lambda name, error: None,
    ):
        """`directory` gets `logs/` and `engines.json`. `note` takes a line about anything that happens to engines,
        `record` every restart, `lost` every engine that is taken out."""
        self.config, self.sources, self.directory = config, sources, directory
        self.device, self.logs = device_of(config), directory / "logs"
        self.note, self._record, self._lost = note, record, lost
        self.frozen = FrozenEngines(config)
        if config.rollout.frozen_engines:
            served = entry_points.load(FROZEN, "routers")
            self.frozen = served(config, self.device, self.logs, note=note, record=record)
        self.groups: dict[str, EngineGroup] = {}
        """Engines by policy; {} where nothing is sampled."""
        self.clients: dict[str, GenerationClient] = {}
        """Ways to them, once they are open."""
        self.proxy: AgentServer | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> EngineService:
        self._stack.push_async_exit(stopping(self.frozen.stop, self.note))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def engines_of(self, policy: str) -> EngineGroup | None:
        """Engines that generate for `policy`, its own or another's; None where nothing is sampled."""
        return self.groups.get(ACTOR if policy in self.config.served_beside else policy)

    def place(self, shared: Sequence[Placement] = ()) -> dict[str, EngineGroup]:
        """Create the engines of each policy, without starting them; {} where the configuration has none.

        `shared`: the places of the actor's trainer ranks with which they take turns, see `EngineGroup`."""
        for name, policy in self.sources.policies.items():
            if policy.config.rollout.policy_engines and name not in self.config.served_beside:
                self.groups[name] = group = EngineGroup(
                    policy.config,
                    self.device,
                    self.logs,
                    moe=policy.spec.experts > 0,
                    router="router" if name == ACTOR else f"router-{name}",
                    shared=shared if name == ACTOR else (),
                    note=self.note,
                    record=self._record,
                )
                self._stack.push_async_exit(stopping(group.stop, self.note))
        return self.groups

    async def open(self, context: int) -> None:
        """Connect client and proxy to engines that have all started. `context`: tokens of the longest trajectory.

        Raises SlimxError for a frozen model that cannot do its work."""
        await self.frozen.check(self.sources.policies[ACTOR].tokenizer)
        groups = [*self.groups.values(), *self.frozen.groups.values()]
        self._stack.callback(tell_restarts, groups, self.note)
        follow(groups, self.directory / "engines.json")
        for group in groups:
            group.members.on_lost = self._lost
            group.members.before_ending = partial(keep_stacks, self.directory, self.note)
        rollout = self.config.rollout
        for name, policy in self.sources.policies.items():
            if (group := self.engines_of(name)) is None:
                continue
            client = self.clients[name] = GenerationClient(
                group.router.url,
                ModelShape.of(policy.spec),
                rollout.request_deadline,
                # While no engine serves, a request waits for one as long as the run does.
                retry_s=rollout.request_deadline,
                retries=rollout.request_retries,
                on_lost=group.members.look,
                outage=group.members.outage,
                api_key=group.keys.api_key,
                adapters=name if self.config.served_beside else None,
            )
            await self._stack.enter_async_context(client)
            group.members.probe = prober(client.shape, self.config, client.adapters)
        self.proxy = make_agent_server(self.config.rollout.proxy, context)
        self._stack.push_async_callback(self.proxy.stop)

    def make_maker(self) -> GroupMaker:
        """A maker of groups with these engines; its owner closes it."""
        speakers = {
            name: Speaker(self.clients.get(name), policy.tokenizer, policy.spec.vocab_size)
            for name, policy in self.sources.policies.items()
        }
        outage = Outages(tuple(group.members.outage for group in self.groups.values()))
        return GroupMaker(
            self.config,
            self.sources.hooks,
            speakers,
            self.frozen.clients,
            self.proxy,
            outage,
            score=self.frozen.scorer(),
        )

    async def watched[T](self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises SlimxError when no engine is left that could come back."""
        return await while_served(work, self.groups[ACTOR].members.failed)


def make_agent_server(settings: Proxy, context: int) -> AgentServer:
    """The server through which agents sample, an entry point. `context`: tokens of the longest trajectory."""
    return entry_points.load("slimx.agent_servers", "http")(settings.host, settings.port, context=context)


def prober(shape: ModelShape, config: Config, adapters: str | None = None) -> Callable[[EngineHandle], Awaitable[None]]:
    """A probe that asks one engine itself, past the router, once for a token, with all that rollouts ask for.
    `adapters`: as for the client."""
    rollout = config.rollout

    async def probe(engine: EngineHandle) -> None:
        asked = GenerationClient(
            engine.url,
            shape,
            rollout.health.timeout,
            retry_s=0,
            retries=0,
            api_key=engine.spec.keys.api_key,
            adapters=adapters,
        )
        async with asked as client:
            await client.generate(GenerationRequest([0], {"max_new_tokens": 1}, 0, rollout.routed_experts))

    return probe


async def check_reach(trainers: RankGroup, engines: EngineGroup) -> None:
    """Raise SlimxError naming an engine on another machine than the publisher if the transport reaches one machine.
    Called as soon as Ray has placed them, before a weight is loaded."""
    config = engines.config
    if not config.publish.one_machine:
        return
    hosts, deadline_s = config.rollout.external_hosts, engines.start_deadline_s
    started = [engine for engine in engines.engines if engine.name not in hosts]
    (publisher,) = await gather(
        [trainers.actors[PUBLISHER].__ray_call__.remote(place_among, list(hosts.values()))],
        what="the look for the publisher's machine",
        holders=[trainers.holder(PUBLISHER)],
        deadline_s=deadline_s,
        logs=trainers.logs[PUBLISHER : PUBLISHER + 1],
    )
    places = await gather(
        [engine.actor.__ray_call__.remote(place_of) for engine in started],
        what="the look for the engines' machines",
        holders=[f"engine {engine.name}" for engine in started],
        deadline_s=deadline_s,
        logs=[engine.log for engine in started],
    )
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    here, beside = publisher
    found = {engine.name: place.node for engine, place in zip(started, places, strict=True)}
    elsewhere = {name: addresses.get(node, node) for name, node in found.items() if node != here}
    elsewhere |= {name: host for name, host in hosts.items() if host not in beside}
    refuse_elsewhere(config.publish.transport, addresses.get(here, here), elsewhere)


def refuse_elsewhere(transport: str, here: str, elsewhere: Mapping[str, str]) -> None:
    """Raise SlimxError if there are engines `elsewhere` (address by name) than at the publisher's address `here`."""
    for name, where in elsewhere.items():
        raise SlimxError(
            f"publish.transport {transport} reaches one machine, and trainer rank {PUBLISHER}, which packs the weights,"
            f" is on {here}, engine {name} on {where}; set it to nixl or disk, or keep the run on one "
            "machine",
            code="publish.reach",
            about=name,
        )
