"""A run in progress: its engines, trainers, state and current step, and the operations that the training loop is
composed of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

from slimx.algorithms.credit import credited
from slimx.config.sections.algorithm import CREDITS
from slimx.config.sections.objectives import ADVANTAGES
from slimx.config.sections.policies import ACTOR
from slimx.data.batch import TrainingRow
from slimx.data.records import Group
from slimx.engines.fleet.group import EngineGroup
from slimx.engines.fleet.handle import EngineHandle
from slimx.errors import Preempted, counted
from slimx.json_types import Json
from slimx.orchestration.batches import make_packer
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.engines.shared import SharedEngines
from slimx.orchestration.policies import TrainedPolicy, metrics_of
from slimx.orchestration.publications import EnginePublications, Publications
from slimx.orchestration.ranks.critic import CriticGroup
from slimx.orchestration.ranks.group import RankGroup
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.recovery import RankLossHandler
from slimx.orchestration.start.prepare import Prepared, PreparedPolicy
from slimx.orchestration.start.prompts import make_source
from slimx.orchestration.state.checkpoints import Checkpointer
from slimx.orchestration.state.recording import Records
from slimx.orchestration.state.saves import RunState, Saves
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.replay import Replay
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.flow.tickets import Batch, Dropped
from slimx.runtime.tasks import unless

StepRows = dict[str, list[list[TrainingRow]]]
"""Training rows (one per trajectory) of a step: policy name -> one list per update."""


class Run:
    """All parts of a started run. `step` is the number of completed steps; `current` is the number of the step in
    progress, counted from 1."""

    def __init__(
        self,
        service: EngineService,
        prepared: Prepared,
        trainers: Mapping[str, TrainerGroup],
        records: Records,
        saves: Saves,
        recovery: RankLossHandler,
        *,
        critic: CriticGroup | None = None,
        leaving: asyncio.Event | None = None,
    ):
        """Assembles parts that have already been started: `service` with the engines, `trainers` by policy, and
        `critic`. `recovery` handles lost ranks of the actor's trainers. `leaving` may be set at any time to make the
        run save and stop."""
        self.config = config = service.config
        self.directory = Path(config.run.dir)
        self.frozen = service.frozen
        self.evaluation_engines = service.evaluation_engines
        self.critic = critic
        self.records = records
        self.eval_prompts = prepared.eval_prompts
        self.leaving = leaving or asyncio.Event()
        self.maker = service.make_maker()
        self.rollouts = self._make_rollouts(prepared, self.maker, service.groups)
        shared = None
        if config.served_by_actor:
            shared = SharedEngines(service.groups[ACTOR].members, [ACTOR, *config.served_by_actor])
        self.policies: dict[str, TrainedPolicy] = {}
        """Trained policies by name, the actor first."""
        for name, policy in prepared.policies.items():
            self.policies[name] = self._policy(name, policy, service, trainers[name], shared)
        self.checkpoints = Checkpointer(trainers, saves, records.timeline, records.table.note, critic)
        self.recovery = recovery
        records.entered = self._mark
        actor = self.policies[ACTOR]
        actor.publications.with_retry = recovery.with_retry
        recovery.on_replaced = actor.publications.renew
        self.sampled = actor.engines is not None
        """True if engines generate rollouts; False if rollouts are replayed or the run needs no rollouts."""
        if actor.engines is not None:
            actor.engines.members.keeper.in_flight = self._in_flight
        self.step = 0
        self.current = 0

    def _policy(
        self,
        name: str,
        prepared: PreparedPolicy,
        service: EngineService,
        trainers: TrainerGroup,
        shared: SharedEngines | None,
    ) -> TrainedPolicy:
        config = prepared.config
        engines = service.engines_of(name)
        publications = Publications()
        if engines is not None:
            publications = EnginePublications(
                name, config, engines, self.maker, trainers, prepared.encoding, self.records.table.note, shared
            )
        return TrainedPolicy(
            name=name,
            config=config,
            trainers=trainers,
            engines=engines,
            client=service.clients.get(name),
            publications=publications,
            packer=make_packer(config, prepared.spec, prepared.sizes),
            sizes=prepared.sizes,
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
        """Version of the weights that the engines serve."""
        return self.maker.version

    # Waiting ----------------------------------------------------------------------------------------------------------

    async def watched[T](self, work: Awaitable[T], *, training: bool = False) -> T:
        """Awaits `work` and returns its result. Raises SlimxError if all engines of the run are lost in the meantime
        (`EnginePublications.watched`). `training`: True if `work` changes the trainers' weights."""
        for policy in self.policies.values():
            work = policy.publications.watched(work, self.step, training=training)
        return await work

    async def unless_leaving[T](self, work: Awaitable[T]) -> T | None:
        """Awaits `work` and returns its result. If the run is asked to save and stop in the meantime, cancels `work`
        and returns None."""
        return await unless(self.leaving, work)

    async def leave(self) -> NoReturn:
        """Writes a checkpoint of the current step with everything sampled so far, and raises Preempted."""
        self.records.table.note(f"a signal asked the run to stop; a checkpoint of step {self.step} is saved first")
        await self.rollouts.rest()
        await self.save()
        await self.finish_save()
        raise Preempted(self.step, self.config.schedule.steps)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Marks the `with` block as phase `name` of the current step, in the timeline, the live table and `slimx
        status`."""
        return self.records.phase(name, self.current)

    def activity(self) -> Json:
        """Returns what the run is doing now, for `slimx status`."""
        return {
            "step": self.current,
            **self.records.activity(),
            "rollouts": self.rollouts.status() if self.sampled else None,
            "awaited": _first(group.members.awaited() for group in self._serving()),
            "late": _first(group.late() for group in self._groups()),
        }

    def _mark(self, phase: str, step: int) -> None:
        """Writes the step and the phase as a marker line into the logs of all trainers and engines."""
        parts: list[RankGroup | EngineHandle] = [*self._groups()]
        for group in self._serving():
            parts += group.engines
        for part in parts:
            part.mark(f"step {step}: {phase}")

    def _serving(self) -> list[EngineGroup]:
        """Returns the engine groups of all policies, each group once even if several policies share it."""
        groups = {}
        for policy in self.policies.values():
            if policy.engines is not None:
                groups[id(policy.engines)] = policy.engines
        return list(groups.values())

    def _groups(self) -> list[RankGroup]:
        """Returns the rank groups of all policies' trainers, and of the critic if it has dedicated ranks."""
        groups: list[RankGroup] = [policy.trainers for policy in self.policies.values()]
        if self.critic is not None and self.critic.dedicated is not None:
            groups.append(self.critic.dedicated)
        return groups

    def _in_flight(self) -> str:
        """Returns the part of the message about a lost router that counts the requests in flight and their groups, such
        as "9 requests of 2 groups, sent again"; "" without a rollout manager."""
        if not isinstance(self.rollouts, RolloutManager):
            return ""
        running = sum(map(attrgetter("running"), self.rollouts.tickets))
        requests = counted(self.maker.gate.out, "request")
        return f"{requests} of {counted(running, 'group')}, sent again"

    def due(self, every: int) -> bool:
        """Returns True if the number of completed steps is a positive multiple of `every`; 0 means never."""
        return every > 0 and self.step > 0 and self.step % every == 0

    # Work -------------------------------------------------------------------------------------------------------------

    async def next_batch(self) -> Batch:
        """Waits for the groups of the next step and returns them. If the run is asked to save and stop in the meantime,
        writes a checkpoint and raises Preempted."""
        self.current = self.step + 1
        with self.phase("generate" if self.sampled else "prepare"):
            batch = await self.watched(self.unless_leaving(self.rollouts.next_batch()))
        if batch is None:
            await self.leave()
        self.records.keep(self.current, self.version, batch, self.maker)
        return batch

    def updates(self, groups: Sequence[Group]) -> StepRows:
        """Returns the training rows of each policy and update, made from the groups of a step, with the rewards that
        `algorithm.credit` assigns to the trajectories. Raises SlimxError if a user's credit or advantage hook has
        corrupted a group."""
        algorithm = self.config.algorithm
        credits = credited(groups, algorithm.credit)
        rows = {name: policy.updates(credits) for name, policy in self.policies.items()}
        for hook, known in ((algorithm.credit, CREDITS), (algorithm.advantages.kind, ADVANTAGES)):
            if hook in known:
                continue
            for group in groups:
                self.maker.check(group, hook)
        return rows

    async def publish(self) -> dict[str, float]:
        """Publishes the trainers' weights to the engines as version `step`, and returns metrics; {} without engines."""
        if not self.sampled:
            if isinstance(self.rollouts, Replay):
                self.maker.version = self.step  # the version that the engines had in the replayed run
            return {}
        with self.phase("publish"):
            metrics = await metrics_of(self.policies, self._publish)
        return self.frozen.metrics() | metrics

    async def _publish(self, policy: TrainedPolicy) -> dict[str, float]:
        metrics = await policy.publications.publish_metrics(self.step)
        if policy.client is not None:
            metrics["rollout/request_retries"] = float(policy.client.retried)
        return metrics

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Marks the part of a step in which trainers compute. Colocated trainers use the devices of the engines, which
        sleep until the `with` block ends."""
        colocated = self.config.schedule.colocate
        if colocated:
            with self.phase("sleep"):
                await self._begin_turn()
        yield
        if colocated:
            actor = self.policies[ACTOR]
            with self.phase("wake"):
                await actor.trainers.offload(weights=False)
                await actor.publications.wake()

    @asynccontextmanager
    async def trainers_turn(self, *, publish: bool = True) -> AsyncIterator[None]:
        """Makes the devices available to the trainers for work between two steps, such as writing a checkpoint.
        Colocated engines sleep during that work and then receive the current weights again. With `publish=False`, they
        receive weights only from a later publication."""
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
        await actor.publications.sleep()
        await actor.trainers.reload()

    # State ------------------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Writes a checkpoint of the current step, unless one exists."""
        if self.checkpoints.saved_step == self.step:
            return
        await self.finish_save()
        with self.phase("save"):
            await self.maker.collect()
            state = self.checkpoints.state(self.step, self.version, self.rollouts.state())
            async with self.trainers_turn():
                await self.recovery.with_retry(lambda: self.checkpoints.save(state))

    async def finish_save(self) -> None:
        """Waits until the last checkpoint is written completely."""
        with self.phase("save_wait"):
            await self.checkpoints.settle()

    async def restore(self, path: Path, state: RunState) -> None:
        """Resumes from the checkpoint in `path`: restores the run from `state`, and loads the trainers' state from the
        checkpoint's files."""
        await self.checkpoints.restore(path, state)
        self.step = state.step
        self.maker.version = state.version
        if isinstance(self.rollouts, Replay):
            self.rollouts.seek(state.step)
        elif self.config.run.fork_prompts == "anew" and path.parent != self.checkpoints.saves.directory:
            dropped = self.rollouts.restart(state.rollouts)
            self.records.table.note(
                "run.fork_prompts is anew, so this run starts with its first prompt and discards the groups "
                f"that waited in {path} (number of groups: {dropped})"
            )
        else:
            self.rollouts.restore(state.rollouts)

    async def export(self, name: str) -> None:
        """Exports the current weights to the Hugging Face directory `name` in the run's directory."""
        with self.phase("export"):
            async with self.trainers_turn():
                await self.recovery.with_retry(lambda: self.checkpoints.export(self.directory / name))

    async def trainer_metrics(self) -> dict[str, float]:
        """Returns the trainers' peak memory, and metrics about replaced ranks."""
        memory = await metrics_of(self.policies, lambda policy: self.recovery.with_retry(policy.trainers.memory))
        return memory | self.recovery.metrics()

    # Records ----------------------------------------------------------------------------------------------------------

    async def record(self, metrics: dict[str, float], groups: Sequence[Group], rows: StepRows, began: float) -> None:
        """Logs the metrics of a finished step, updates the live table, and saves some of the step's samples. `began`:
        value of `time.perf_counter()` at the start of the step. If an asynchronous save has failed, raises its
        error."""
        await self.records.kept()
        seconds = time.perf_counter() - began
        tokens = 0
        for updates in rows.values():
            for update in updates:
                tokens += sum(len(row) for row in update)
        metrics["perf/tokens_per_second"] = tokens / seconds
        metrics |= await self.trainer_metrics()
        self.records.step(self.step, self.version if self.sampled else None, metrics, groups, seconds)
        self.checkpoints.check()

    def _drop(self, dropped: Dropped) -> None:
        step = self.current
        if isinstance(self.rollouts, RolloutManager):
            step = self.rollouts.counting(self.current, self.step)
        self.records.drop(dropped, step)


def _first(items: Iterable[Json | None]) -> Json | None:
    """Returns the first item that is not empty; None if all are empty."""
    for item in items:
        if item:
            return item
    return None
