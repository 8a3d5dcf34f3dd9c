"""One run: engines, trainers and state, and its position."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

from slimx.algorithms.credit import credited
from slimx.config.sections.algorithm import CREDITS
from slimx.config.sections.objectives import ADVANTAGES
from slimx.config.sections.policies import ACTOR
from slimx.data.batch import TrainingRow
from slimx.data.records import Group
from slimx.engines.fleet.group import EngineGroup
from slimx.errors import Preempted
from slimx.orchestration.batches import make_packer
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.engines.shared import SharedEngines
from slimx.orchestration.policies import TrainedPolicy, metrics_of
from slimx.orchestration.publications import Publications, publication_metrics
from slimx.orchestration.ranks.critic import CriticGroup
from slimx.orchestration.ranks.group import RankGroup
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.recovery import Recovery
from slimx.orchestration.start.prepare import Prepared, PreparedPolicy
from slimx.orchestration.start.prompts import make_source
from slimx.orchestration.state.checkpoints import Checkpointer
from slimx.orchestration.state.recording import Records
from slimx.orchestration.state.saves import RunState, Saves
from slimx.preflight.facts import route_shape
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.replay import Replay
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.flow.tickets import Batch, Dropped
from slimx.runtime.tasks import unless

StepRows = dict[str, list[list[TrainingRow]]]
"""By policy and update the rows of a step."""


class Run:
    """All parts of a started run. `step` counts the steps done, `current` is the one in progress, from 1."""

    def __init__(
        self,
        service: EngineService,
        prepared: Prepared,
        trainers: Mapping[str, TrainerGroup],
        records: Records,
        saves: Saves,
        recovery: Recovery,
        *,
        critic: CriticGroup | None = None,
        leaving: asyncio.Event | None = None,
    ):
        """`service`, `trainers` (by policy) and `critic` have started. `recovery`: of the actor's
        trainers. `leaving` is set when the run shall save and end, whatever step it is at."""
        config = self.config = service.config
        self.directory = Path(config.run.dir)
        self.frozen, self.critic, self.records = service.frozen, critic, records
        self.eval_prompts = prepared.eval_prompts
        self.leaving = leaving or asyncio.Event()
        self.maker = service.make_maker()
        self.rollouts = self._make_rollouts(prepared, self.maker, service.groups)
        shared = None
        if config.served_beside:
            shared = SharedEngines(service.groups[ACTOR].members, [ACTOR, *config.served_beside])
        self.policies = {
            name: self._policy(name, policy, service, trainers[name], shared)
            for name, policy in prepared.policies.items()
        }
        """The trained policies, first the actor."""
        self.checkpoints = Checkpointer(trainers, saves, records.timeline, records.table.note, critic)
        self.recovery = recovery
        records.entered = self._mark
        actor = self.policies[ACTOR]
        actor.publications.lasting = recovery.lasting
        recovery.on_replaced = actor.publications.delivery.renew
        self.sampled = actor.engines is not None
        """True if engines generate; else rollouts are replayed, or nothing is sampled."""
        if actor.engines is not None:
            actor.engines.members.keeper.in_flight = self._in_flight
        self.step = self.current = 0

    def _policy(
        self,
        name: str,
        prepared: PreparedPolicy,
        service: EngineService,
        trainers: TrainerGroup,
        shared: SharedEngines | None,
    ) -> TrainedPolicy:
        config, engines = prepared.config, service.engines_of(name)
        parts = (self.maker, trainers, prepared.encoding, self.records)
        return TrainedPolicy(
            name=name,
            config=config,
            trainers=trainers,
            engines=engines,
            client=service.clients.get(name),
            publications=Publications(name, config, engines, *parts, shared),
            packer=make_packer(config, prepared.spec, prepared.sizes),
            sizes=prepared.sizes,
            routes=route_shape(prepared.spec) if config.trainer.moe.routing_replay == "R3" else None,
        )

    def _make_rollouts(
        self, prepared: Prepared, maker: GroupMaker, engines: Mapping[str, EngineGroup]
    ) -> RolloutManager | Replay:
        if self.config.rollout.replay:
            return Replay(Path(self.config.rollout.replay))

        async def interrupt() -> None:
            await asyncio.gather(*(group.interrupt() for group in engines.values()))

        source = make_source(self.config, prepared.by_source)
        return RolloutManager(self.config, source, maker, on_drop=self._drop, abort=interrupt)

    @property
    def version(self) -> int:
        """The weight version that the engines have."""
        return self.maker.version

    # Waiting ----------------------------------------------------------------------------------------------------------

    async def watched[T](self, work: Awaitable[T], *, training: bool = False) -> T:
        """Wait for `work`, but not beyond the moment when the run has lost its engines for good; see
        `Publications.watched`."""
        for policy in self.policies.values():
            work = policy.publications.watched(work, self.step, training=training)
        return await work

    async def unless_leaving[T](self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if the run is to end first: `work` is cancelled then."""
        return await unless(self.leaving, work)

    async def leave(self) -> NoReturn:
        """Write a checkpoint of the present step, with all that was sampled by now, and raise Preempted."""
        self.records.table.note(f"asked to leave: saving step {self.step}, then the run ends")
        await self.rollouts.rest()
        await self.save()
        await self.finish_save()
        raise Preempted(self.step, self.config.schedule.steps)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A named part of the present step, in the timeline, the live table and the status."""
        return self.records.phase(name, self.current)

    def activity(self) -> dict[str, Any]:
        """The present activity of the run, for `slimx status`."""
        return {
            "step": self.current,
            **self.records.activity(),
            "rollouts": self.rollouts.status() if self.sampled else None,
            "awaited": next((told for group in self._serving() if (told := group.members.awaited())), None),
            "late": next((late for group in self._groups() if (late := group.late()) is not None), None),
        }

    def _mark(self, phase: str, step: int) -> None:
        """Have the logs of trainers and engines say what their lines belong to."""
        engines = [engine for group in self._serving() for engine in group.engines]
        for part in (*self._groups(), *engines):
            part.mark(f"step {step}: {phase}")

    def _serving(self) -> list[EngineGroup]:
        """Engines of all policies, those of several policies once."""
        groups = {id(policy.engines): policy.engines for policy in self.policies.values()}
        return [group for group in groups.values() if group is not None]

    def _groups(self) -> list[RankGroup]:
        """The trainers' ranks of all policies, and those of a critic of its own."""
        own = [] if self.critic is None or self.critic.own is None else [self.critic.own]
        return [*(policy.trainers for policy in self.policies.values()), *own]

    def _in_flight(self) -> str:
        """The requests that are lost with the router, and whose they are."""
        if not isinstance(self.rollouts, RolloutManager):
            return ""
        groups = [f"g{ticket.number}" for ticket in self.rollouts.tickets if ticket.running]
        of = f" of groups {', '.join(groups[:8])}" + f" and {len(groups) - 8} more" * (len(groups) > 8)
        return f"{self.maker.gate.out} requests{of if groups else ''} are sent again"

    def due(self, every: int) -> bool:
        """True after every step whose number is a multiple of `every`; 0: never."""
        return every > 0 and self.step > 0 and self.step % every == 0

    # Work -------------------------------------------------------------------------------------------------------------

    async def next_batch(self) -> Batch:
        """The groups of the next step. Raises Preempted, with a checkpoint, if the run is to leave before they are
        there."""
        self.current = self.step + 1
        with self.phase("generate"):
            batch = await self.watched(self.unless_leaving(self.rollouts.next_batch()))
        if batch is None:
            await self.leave()
        self.records.keep(self.current, self.version, batch)
        return batch

    def updates(self, groups: Sequence[Group]) -> StepRows:
        """The rows that one step's groups give each policy, with the credit that `algorithm.credit` gives. Raises
        SlimxError where a hook of these spoils a group."""
        algorithm = self.config.algorithm
        credits = credited(groups, algorithm.credit)
        rows = {name: policy.updates(credits) for name, policy in self.policies.items()}
        for hook, known in ((algorithm.credit, CREDITS), (algorithm.advantages.kind, ADVANTAGES)):
            for group in groups if hook not in known else ():
                self.maker.check(group, hook)
        return rows

    async def publish(self) -> dict[str, float]:
        """Bring the trainers' weights into the engines as version `step`; {} without engines."""
        if not self.sampled:
            if isinstance(self.rollouts, Replay):
                self.maker.version = self.step  # of the engines of the run that is replayed
            return {}
        with self.phase("publish"):
            metrics = await metrics_of(self.policies, self._publish)
        return self.frozen.metrics() | metrics

    async def _publish(self, policy: TrainedPolicy) -> dict[str, float]:
        done = await policy.publications.publish(self.step)
        retried = {"rollout/request_retries": float(policy.client.retried)}
        return publication_metrics(done) | policy.engines.members.metrics() | retried

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The part of a step in which the trainers work, of colocated ones on the engines' devices."""
        colocated = self.config.schedule.colocate
        if colocated:
            with self.phase("sleep"):
                await self._begin_turn()
        yield
        if colocated:
            actor = self.policies[ACTOR]
            with self.phase("wake"):
                await actor.trainers.offload(weights=False)
                await actor.engines.wake()

    @asynccontextmanager
    async def trainers_turn(self, *, publish: bool = True) -> AsyncIterator[None]:
        """Between two steps: the trainers' state is on their devices. Colocated engines sleep meanwhile, and get the
        present version again; without `publish` that is left to a publication that follows."""
        if not self.config.schedule.colocate:
            yield
            return
        await self._begin_turn()
        yield
        actor = self.policies[ACTOR]
        await actor.trainers.offload(weights=False)
        if publish:
            await actor.publications.publish(self.step)

    async def _begin_turn(self) -> None:
        actor = self.policies[ACTOR]
        await actor.engines.sleep()
        await actor.trainers.reload()

    # State ------------------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Write a checkpoint of the present step, unless this step has one."""
        if self.checkpoints.saved_step == self.step:
            return
        await self.finish_save()
        with self.phase("save"):
            state = self.checkpoints.state(self.step, self.version, self.rollouts.state())
            async with self.trainers_turn():
                await self.recovery.lasting(lambda: self.checkpoints.save(state))

    async def finish_save(self) -> None:
        """Wait until the last checkpoint is on disk."""
        with self.phase("save_wait"):
            await self.checkpoints.settle()

    async def restore(self, path: Path, state: RunState) -> None:
        """Continue from the checkpoint in `path`."""
        await self.checkpoints.restore(path, state)
        self.step, self.maker.version = state.step, state.version
        if isinstance(self.rollouts, Replay):
            self.rollouts.seek(state.step)
        elif self.config.run.fork_prompts == "anew" and path.parent != self.checkpoints.saves.directory:
            left = self.rollouts.restart(state.rollouts)
            self.records.table.note(f"prompts begin anew after {path}: {left} groups that waited there are left out")
        else:
            self.rollouts.restore(state.rollouts)

    async def export(self, name: str) -> None:
        """Write the present weights as the Hugging Face directory `name` in the run's own."""
        with self.phase("export"):
            async with self.trainers_turn():
                await self.recovery.lasting(lambda: self.checkpoints.export(self.directory / name))

    async def trainer_metrics(self) -> dict[str, float]:
        """The trainers' peak memory, and what was done to replace lost ones."""
        memory = await metrics_of(self.policies, lambda policy: self.recovery.lasting(policy.trainers.memory))
        return memory | self.recovery.metrics()

    # Records ----------------------------------------------------------------------------------------------------------

    async def record(self, metrics: dict[str, float], groups: Sequence[Group], rows: StepRows, began: float) -> None:
        """Log a finished step that began at `began` of the clock, show it, and keep a few of its samples. Raises the
        error of a save in the background."""
        await self.records.kept()
        seconds = time.perf_counter() - began
        tokens = sum(len(row) for updates in rows.values() for update in updates for row in update)
        metrics["perf/tokens_per_second"] = tokens / seconds
        metrics |= await self.trainer_metrics()
        self.records.step(self.step, self.version if self.sampled else None, metrics, groups, seconds)
        self.checkpoints.check()

    def _drop(self, dropped: Dropped) -> None:
        self.records.drop(dropped, self.rollouts.counting(self.current, self.step))
