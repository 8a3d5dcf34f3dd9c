"""Puts engines, client, proxy, frozen engines and roster together: whatever answers the rollouts of a command.

GroupMaker --> GenerationClient --> router --> policy engines    (trained, or fixed at the weights they start with)
    |--------> FrozenEngine ------> router --> frozen engines    (judges, reward models, teachers)
    |--------> ChatProxy <--------- agents
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from slimx.cluster.connection import device_of
from slimx.cluster.place import Placement
from slimx.cluster.restarts import Restart
from slimx.config.schema import Config
from slimx.engines.fleet.group import EngineGroup, tell_restarts
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.fleet.roster import follow
from slimx.errors import SlimxError
from slimx.orchestration.frozen import FrozenEngines
from slimx.orchestration.lifetime.hangs import keep_stacks
from slimx.orchestration.lifetime.lifetime import stopping
from slimx.orchestration.prepare import Sources
from slimx.orchestration.waits import while_served
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.proxy.server import ChatProxy


class EngineService:
    """The engines of a command and everything in front of them.

        async with EngineService(...) as service:
            engines = service.place()
            await together([service.frozen.start(), engines.start()])
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
        """`directory` gets `logs/` and `engines.json`. `note` is told in one line what happens to engines, `record` of
        every restart, `lost` of every engine that is taken out."""
        self.config, self.sources, self.directory = config, sources, directory
        self.device, self.logs = device_of(config), directory / "logs"
        self.note, self._record, self._lost = note, record, lost
        self.frozen = FrozenEngines(config, self.device, self.logs, note=note, record=record)
        self.engines: EngineGroup | None = None
        """The policy's; None where nothing is sampled."""
        self.client: GenerationClient | None = None
        self.proxy: ChatProxy | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> EngineService:
        self._stack.push_async_exit(stopping(self.frozen.stop, self.note))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def place(self, shared: Sequence[Placement] = ()) -> EngineGroup | None:
        """Create the policy's engines, without starting them; None where the configuration has none.

        `shared`: the places of trainer ranks with which they take turns, see `EngineGroup`."""
        if self.config.rollout.policy_engines:
            self.engines = EngineGroup(
                self.config,
                self.device,
                self.logs,
                moe=self.sources.spec.experts > 0,
                note=self.note,
                record=self._record,
                shared=shared,
            )
            self._stack.push_async_exit(stopping(self.engines.stop, self.note))
        return self.engines

    async def open(self, context: int) -> None:
        """Connect client and proxy to engines that have all started. `context`: tokens of the longest trajectory.

        Raises SlimxError for a teacher with another vocabulary."""
        await self.frozen.check_teacher(self.sources.tokenizer)
        groups = [*([self.engines] if self.engines is not None else []), *self.frozen.groups.values()]
        self._stack.callback(tell_restarts, groups, self.note)
        follow(groups, self.directory / "engines.json")
        for group in groups:
            group.members.on_lost = self._lost
            group.members.before_ending = partial(keep_stacks, self.directory, self.note)
        if self.engines is not None:
            rollout = self.config.rollout
            self.client = GenerationClient(
                self.engines.router.url,
                ModelShape.of(self.sources.spec),
                rollout.request_deadline,
                # While no engine serves, a request waits for one as long as the run does.
                retry_s=rollout.request_deadline,
                retries=rollout.request_retries,
                on_lost=self.engines.members.look,
                outage=self.engines.members.outage,
                api_key=self.engines.keys.api_key,
            )
            await self._stack.enter_async_context(self.client)
            self.engines.members.probe = prober(self.client.shape, self.config)
        self.proxy = ChatProxy(self.config.rollout.proxy.host, self.config.rollout.proxy.port, context=context)
        self._stack.push_async_callback(self.proxy.stop)

    def make_maker(self) -> GroupMaker:
        """A maker of groups with these engines; its owner closes it."""
        outage = None if self.engines is None else self.engines.members.outage
        return GroupMaker(
            self.config,
            self.sources.hooks,
            self.sources.tokenizer,
            self.client,
            self.frozen.clients,
            self.proxy,
            outage,
        )

    async def watched[T](self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises SlimxError when no engine is left that could come back."""
        return await while_served(work, self.engines.members.failed)


def prober(shape: ModelShape, config: Config) -> Callable[[EngineHandle], Awaitable[None]]:
    """A probe that asks one engine itself, past the router, once for a token, with all that rollouts ask for."""
    rollout = config.rollout

    async def probe(engine: EngineHandle) -> None:
        asked = GenerationClient(
            engine.url, shape, rollout.health.timeout, retry_s=0, retries=0, api_key=engine.keys.api_key
        )
        async with asked as client:
            await client.generate(GenerationRequest([0], {"max_new_tokens": 1}, 0, rollout.routed_experts))

    return probe
