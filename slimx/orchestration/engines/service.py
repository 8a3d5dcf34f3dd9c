"""Assembly of everything that serves a command's rollouts: policy engines and frozen engines, their clients, and the
agent server.

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
from typing import TYPE_CHECKING, Any

import ray

from slimx import entry_points
from slimx.cluster.connection import device_of
from slimx.cluster.place import Placement, place_among, place_of
from slimx.cluster.restarts import Restart
from slimx.cluster.starting import worker_count
from slimx.cluster.waiting import gather
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.engines.fleet.group import EngineGroup, follow, note_restarts
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.outage import Outages
from slimx.errors import SlimxError
from slimx.orchestration.lifetime.hangs import keep_stacks
from slimx.orchestration.lifetime.lifetime import stopping
from slimx.orchestration.ranks.group import RankGroup
from slimx.orchestration.start.prepare import Sources
from slimx.reshard.packed import PUBLISHER
from slimx.rollout.client.generation import Endpoint, GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.rollouts import GroupMaker, Score
from slimx.rollout.hooks import AgentServer
from slimx.rollout.policy import make_agent_server, policy_client
from slimx.runtime.tasks import while_served

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FrozenEngines:
    """Engine groups of `rollout.engines` that serve frozen models, to which no weights are published. This base class
    has no groups. A subclass, the entry point of `slimx.frozen_engines`, is called with the configuration, the device,
    the log directory, and the keyword arguments `note` and `record` of `EngineService`."""

    def __init__(self, config: Config):
        self.config = config
        self.groups: dict[str, EngineGroup] = {}
        self.clients: dict[str, Any] = {}
        """Clients that hooks use to send requests to each group, by the group's name."""

    async def start(self) -> None:
        """Starts the servers of all groups and returns when they accept requests. From then on, servers that fail are
        restarted."""

    async def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises SlimxError if the model of a group cannot be used together with a policy whose tokenizer is
        `tokenizer`. Called when all servers have started."""

    def scorer(self) -> Score | None:
        """Returns the function that scores finished rollouts with the frozen models; None if no group scores
        rollouts."""
        return None

    def metrics(self) -> dict[str, float]:
        """Returns each group's metrics for a step, such as `engines/GROUP/serving`."""
        return {}

    async def stop(self) -> None:
        """Stops the routers and the servers that slimx started; external servers keep running."""


class EvaluationEngines(FrozenEngines):
    """Evaluation engines (`eval.engines`), under the name of the policy that they serve. This base class has no groups,
    so that the policy's other engines evaluate."""

    async def begin(self, run: Any, *, resumed: bool = False) -> dict[str, float] | None:
        """Begins to evaluate the current weights. Returns metrics of the step, among them the result unless the
        evaluation continues during training; None if other engines must evaluate. `resumed`: True for the weights from
        which the run resumes, which are evaluated only if an earlier process did not finish their evaluation."""
        return None

    async def cancel(self) -> None:
        """Cancels the evaluation that continues during training."""


class EngineService:
    """The engines of a command, their clients, and the server through which agents sample.

        async with EngineService(...) as service:
            groups = service.place()
            await together([service.frozen.start, *(engines.start for engines in groups.values())])
            await service.open(context)
            maker = service.make_maker()

    Leaving the block stops everything in reverse order. If the block ended with an error, this error is raised even if
    stopping fails too."""

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
        """Prepares the service without starting anything. The directory `logs/` and the file `engines.json` are written
        into `directory`. `note` is called with a message about each engine event, `record` with each restart, and
        `lost` with the name and error of each engine that is taken out of service."""
        self.config = config
        self.sources = sources
        self.directory = directory
        self.device = device_of(config)
        self.logs = directory / "logs"
        self.note = note
        self._record = record
        self._lost = lost
        self.frozen = FrozenEngines(config)
        if config.served.frozen:
            self.frozen = entry_points.load("slimx.frozen_engines", "routers")(
                config, self.device, self.logs, note=note, record=record
            )
        self.evaluation_engines = EvaluationEngines(config)
        if config.served.evaluation:
            self.evaluation_engines = entry_points.load("slimx.evaluation_engines", "engines")(
                self, note=note, record=record
            )
        self.groups: dict[str, EngineGroup] = {}
        """Engine group of each policy by the policy's name; empty if the command samples nothing."""
        self.clients: dict[str, GenerationClient] = {}
        """Clients of the engines by policy, added by `open`."""
        self.proxy: AgentServer | None = None
        self._pool: GroupMaker | None = None
        """Maker whose groups rollout workers generate; None if this process generates them."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> EngineService:
        for part in (self.frozen, self.evaluation_engines):
            self._stack.push_async_exit(stopping(part.stop, self.note))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def engines_of(self, policy: str) -> EngineGroup | None:
        """Returns the engines that generate for `policy`, which several policies may share; None if the command samples
        nothing."""
        if policy in self.config.served_by_actor:
            policy = ACTOR
        return self.groups.get(policy)

    def place(self, shared: Sequence[Placement] = ()) -> dict[str, EngineGroup]:
        """Creates the engine group of each policy without starting it, and returns the groups by policy; {} if the
        configuration has no engines. `shared`: GPUs of the actor's trainer ranks, on which colocated engines are
        placed."""
        for name, policy in self.sources.policies.items():
            if policy.config.served.policy and name not in self.config.served_by_actor:
                group = EngineGroup(
                    policy.config,
                    self.device,
                    self.logs,
                    moe=policy.spec.experts > 0,
                    router="router" if name == ACTOR else f"router-{name}",
                    shared=shared if name == ACTOR else (),
                    note=self.note,
                    record=self._record,
                )
                for others in self.evaluation_engines.groups.values():
                    group.receivers += others.engines
                self.groups[name] = group
                self._stack.push_async_exit(stopping(group.stop, self.note))
        return self.groups

    async def open(self, context: int) -> None:
        """Creates the clients of the started engines, and the agent server. `context`: maximum length of a trajectory
        in tokens. Raises SlimxError if a frozen model cannot be used with the actor's tokenizer."""
        await self.frozen.check(self.sources.policies[ACTOR].tokenizer)
        groups = [*self.groups.values(), *self.frozen.groups.values(), *self.evaluation_engines.groups.values()]
        self._stack.callback(note_restarts, groups, self.note)
        follow(groups, self.directory / "engines.json")
        for group in groups:
            group.members.on_lost = self._lost
            group.members.before_ending = partial(keep_stacks, self.directory, self.note)
        endpoints: dict[str, Endpoint] = {}
        served = [(name, self.engines_of(name), self.clients) for name in self.sources.policies]
        served += [
            (name, engines, self.evaluation_engines.clients) for name, engines in self.evaluation_engines.groups.items()
        ]
        for name, engines, clients in served:
            if engines is None:
                continue
            policy = self.sources.policies[name]
            endpoint = Endpoint(
                url=engines.router.url,
                shape=ModelShape.of(policy.spec),
                api_key=engines.keys.api_key,
                adapters=name if self.config.served_by_actor else None,
                images=str(policy.config.images),
            )
            if clients is self.clients:
                endpoints[name] = endpoint
            client = endpoint.client(self.config.rollout, engines.members.look, engines.members.outage)
            clients[name] = client
            await self._stack.enter_async_context(client)
            engines.members.probe = prober(client.shape, self.config, client.adapters)
        self.proxy = make_agent_server(self.config.rollout.proxy, context)
        self._stack.push_async_callback(self.proxy.stop)
        self._stack.push_async_callback(self.evaluation_engines.cancel)  # before the clients close
        count = worker_count(self.config)
        if count:
            self._pool = pool = self._maker(entry_points.load("slimx.rollout_workers", "pool"), self)
            served_by = {name: group for name, group, clients in served if clients is self.clients}
            await self._stack.enter_async_context(
                pool.started(count, endpoints, served_by, context, self.logs, note=self.note, record=self._record)
            )

    def make_maker(self, served: FrozenEngines | None = None) -> GroupMaker:
        """Returns a `GroupMaker` that generates rollouts with the engines of `served`, by default those of this
        service. The caller must close it."""
        if served is None:
            return self._pool or self._maker(GroupMaker, self)
        return self._maker(GroupMaker, served)

    def _maker[M: GroupMaker](self, kind: type[M], served: EngineService | FrozenEngines) -> M:
        """Returns a maker of class `kind` for the engines of `served`."""
        policies = {}
        for name, policy in self.sources.policies.items():
            client = served.clients.get(name)
            policies[name] = policy_client(policy.config, policy.spec, policy.tokenizer, client, self._stack)
        outage = Outages(tuple(group.members.outage for group in served.groups.values()))
        return kind(
            self.config,
            self.sources.hooks,
            policies,
            self.frozen.clients,
            self.proxy,
            outage,
            score=self.frozen.scorer(),
        )

    async def watched[T](self, work: Awaitable[T]) -> T:
        """Awaits `work` and returns its result. Raises SlimxError when all of the actor's engines are lost and none can
        be restarted."""
        return await while_served(work, self.groups[ACTOR].members.failed)


def prober(shape: ModelShape, config: Config, adapters: str | None = None) -> Callable[[EngineHandle], Awaitable[None]]:
    """Returns a probe that requests one token directly from an engine, bypassing the router, with the options that
    rollouts use. `adapters`: name of the policy whose adapters the engine applies; None to use the base weights."""
    rollout = config.rollout

    async def probe(engine: EngineHandle) -> None:
        probing = GenerationClient(
            engine.url,
            shape,
            rollout.health.timeout,
            retry_s=0,
            retries=0,
            api_key=engine.spec.keys.api_key,
            adapters=adapters,
        )
        async with probing as client:
            await client.generate(GenerationRequest([0], {"max_new_tokens": 1}, 0, rollout.routed_experts))

    return probe


async def check_reach(trainers: RankGroup, engines: EngineGroup) -> None:
    """Raises SlimxError naming an engine that is on a different machine from the publisher (the trainer rank that packs
    the weights), if `publish.transport` works only within one machine. Must be called as soon as Ray has placed the
    actors, before weights are loaded."""
    config = engines.config
    if not config.publish.one_machine:
        return
    hosts = config.served.external_hosts
    deadline_s = engines.start_deadline_s
    started = []
    holders = []
    logs = []
    for engine in engines.engines:
        if engine.name not in hosts:
            started.append(engine)
            holders.append(f"engine {engine.name}")
            logs.append(engine.log)
    ((publisher_node, publisher_hosts),) = await gather(
        [trainers.actors[PUBLISHER].__ray_call__.remote(place_among, list(hosts.values()))],
        what="the lookup of the publisher's machine",
        holders=[trainers.holder(PUBLISHER)],
        deadline_s=deadline_s,
        logs=trainers.logs[PUBLISHER : PUBLISHER + 1],
    )
    places = await gather(
        [engine.actor.__ray_call__.remote(place_of) for engine in started],
        what="the lookup of the engines' machines",
        holders=holders,
        deadline_s=deadline_s,
        logs=logs,
    )
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    remote: dict[str, str] = {}
    for engine, placement in zip(started, places, strict=True):
        node = placement.node or ""
        if node != publisher_node:
            remote[engine.name] = addresses.get(node, node)
    for name, host in hosts.items():
        if host not in publisher_hosts:
            remote[name] = host
    refuse_elsewhere(config.publish.transport, addresses.get(publisher_node, publisher_node), remote)


def refuse_elsewhere(transport: str, publisher: str, remote: Mapping[str, str]) -> None:
    """Raises SlimxError naming an engine that is on a different machine from the publisher, if there is one. `remote`:
    addresses of all engines on machines other than the publisher's, by name. `publisher`: address of the publisher.
    `transport`: value of `publish.transport`."""
    for name, engine in remote.items():
        raise SlimxError(
            f"publish.transport={transport} works only within one machine, but engine {name} is on {engine} and "
            f"trainer rank {PUBLISHER}, which packs the weights, is on {publisher}; set publish.transport to nixl or "
            "disk, or place the engine and this rank on one machine",
            code="publish.reach",
            about=name,
        )
