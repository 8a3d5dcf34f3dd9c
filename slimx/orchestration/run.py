"""One run: its parts and its position."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slimx.algorithms.advantages.estimate import all_advantages
from slimx.cluster.restarts import Restarts
from slimx.cluster.waiting import first_line
from slimx.config.schema import Config
from slimx.data.batch import Row
from slimx.data.prompts import DataSource
from slimx.data.records import Group, Prompt
from slimx.data.routes import RouteShape, check_routes
from slimx.engines.delivery.deliveries import make_delivery
from slimx.engines.fleet.group import EngineGroup
from slimx.engines.fleet.membership import Joining
from slimx.errors import Preempted, SlimxError
from slimx.layout.ranks import Sizes
from slimx.orchestration.batches import Packer, make_update_rows
from slimx.orchestration.frozen import FrozenEngines
from slimx.orchestration.ranks.critic import CriticGroup
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.state.checkpoints import Checkpoints, layout_of
from slimx.orchestration.state.recording import Records, drop_record
from slimx.orchestration.state.saves import RunState, Saves
from slimx.orchestration.waits import unless, while_served
from slimx.reshard.manifest import Encoding
from slimx.reshard.pack.gather import PUBLISHER
from slimx.reshard.parties import Delivery, Members, NoReceiverLeft, Source, TransportLost
from slimx.reshard.publish import Publication, Publisher
from slimx.rollout.client.generation import GenerationClient
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.replay import Replay
from slimx.rollout.flow.rollouts import GroupMaker, GroupOutcome
from slimx.runtime.threads import in_thread

T = TypeVar("T")


class Run:
    """All parts of a started run. `step` counts the steps done, `version` is the engines' weight version."""

    def __init__(
        self,
        config: Config,
        *,
        sizes: Sizes,
        packer: Packer,
        trainers: TrainerGroup,
        engines: EngineGroup | None,
        frozen: FrozenEngines | None = None,
        client: GenerationClient | None,
        maker: GroupMaker,
        source: DataSource | Replay,
        eval_prompts: dict[str, list[Prompt]],
        tokenizer: Any,
        saves: Saves,
        records: Records,
        encoding: Encoding = "hf",
        critic: CriticGroup | None = None,
        routes: RouteShape | None = None,
        leaving: asyncio.Event | None = None,
    ):
        """`leaving` is set when the run shall save and end, whatever step it is at. `source`: of prompts, or of batches
        that another run has saved."""
        self.config, self.sizes, self.directory = config, sizes, Path(config.run.dir)
        self.packer, self.critic = packer, critic
        self.trainers, self.engines, self.client, self.maker = trainers, engines, client, maker
        abort = {} if engines is None else {"abort": engines.interrupt}
        self.rollouts = (
            source if isinstance(source, Replay) else RolloutManager(config, source, maker, on_drop=self._drop, **abort)
        )
        self.eval_prompts, self.tokenizer, self.records = eval_prompts, tokenizer, records
        self.checkpoints = Checkpoints(
            config, sizes, trainers, saves, records.timeline, records.table.note, critic=critic
        )
        self.encoding: Encoding = encoding
        self.frozen = frozen
        self.routes = routes
        """What the engines' routes must look like to be replayed; None where they are not."""
        self.leaving = leaving or asyncio.Event()
        courier = Restarts(
            "courier", config.rollout.health, note=lambda text: records.table.note(text), record=records.restarted
        )
        self.delivery = make_delivery(trainers.actors[PUBLISHER], config, self.directory / "logs", courier)
        self.publisher = None
        if engines is not None:
            engines.members.keeper.in_flight = self._in_flight
            self.publisher = self._publisher(trainers, engines.members, self.delivery)
        self.step = 0
        self.current = 0
        """Number of the step in progress, from 1; 0 before the first."""
        self.version = 0
        self._saved_step, self._saved_at = -1, time.monotonic()
        self._phase, self._phase_since = "start", time.time()

    # Waiting
    # ------------------------------------------------------------------------------------------------------------

    async def watched(self, work: Awaitable[T], *, training: bool = False) -> T:
        """Wait for `work`, but not beyond the moment when the run has lost its engines for good.

        Where engines are all out and one of them comes back, it gets the present version; not while `training`, when
        the trainers' weights are between two versions: then the publication that follows brings the next one. A
        delivery that keeps versions brings the present one to whichever engine comes back, at any time.
        """
        if self.engines is None:
            return await work
        members, kept = self.engines.members, self.delivery.keeps

        def needed() -> Awaitable[None]:
            return members.back() if kept else members.failed() if training else members.starved()

        async def supply() -> None:
            nonlocal kept
            if kept:
                kept = await self._catch_up()
            else:
                await self._publish()

        return await while_served(work, needed, supply)

    async def unless_leaving(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if the run is to end first: `work` is cancelled then."""
        return await unless(self.leaving, work)

    async def leave(self) -> None:
        """Write a checkpoint of the present step, with all that was sampled by now, and raise Preempted."""
        self.records.table.note(f"SIGUSR1: saving step {self.step}, then the run ends")
        await self.rollouts.rest()
        await self.save()
        await self.finish_save()
        raise Preempted(self.step, self.config.schedule.steps)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named part of the present step, in the timeline, the live table and the status."""
        self.records.table.phase(name)
        self._phase, self._phase_since = name, time.time()
        with self.records.timeline.phase(name, step=self.current):
            yield

    def activity(self) -> dict[str, Any]:
        """What the run does now, for `slimx status`."""
        return {
            "step": self.current,
            "phase": self._phase,
            "since": self._phase_since,
            "rollouts": self.rollouts.status() if self.engines is not None else None,
            "awaited": self.engines.members.awaited() if self.engines is not None else None,
        }

    def _in_flight(self) -> str:
        """The requests that are lost with the router, and whose they are."""
        if not isinstance(self.rollouts, RolloutManager):
            return ""
        groups = [f"g{ticket.number}" for ticket in self.rollouts.tickets if ticket.running]
        of = f" of groups {', '.join(groups[:8])}" + f" and {len(groups) - 8} more" * (len(groups) > 8)
        return f"{self.maker.gate.out} requests{of if groups else ''} are sent again"

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps happens after the present one."""
        return every > 0 and self.step > 0 and self.step % every == 0

    def save_due(self) -> bool:
        """True after the steps and the time that `checkpoint` says."""
        options = self.config.checkpoint
        late = options.every_seconds is not None and time.monotonic() - self._saved_at >= options.every_seconds
        return late or self.due(options.every)

    # Work
    # ----------------------------------------------------------------------------------------------------------------

    def updates(self, groups: list[Group]) -> list[list[Row]]:
        """The rows that one step's groups give, update by update; with a critic their advantages come later."""
        if self.routes is not None:
            check_routes([trajectory for group in groups for trajectory in group.trajectories], self.routes)
        return make_update_rows(self.config, groups, partial(all_advantages, self.config.algorithm))

    async def publish(self) -> dict[str, float]:
        """Bring the trainers' weights into the engines as version `step`; {} without engines."""
        if self.publisher is None:
            if isinstance(self.rollouts, Replay):
                self.version = self.step  # of the engines of the run that is replayed
            return {}
        with self.phase("publish"):
            done = await self._publish()
        out = {f"publish/{stage}_seconds": seconds for stage, seconds in done.seconds.items()}
        out |= {"publish/tensors_verified": float(done.tensors), "publish/mib": done.nbytes / 2**20}
        out["publish/engines_verified"] = float(len(done.engines) - len(done.lost))
        out |= self.frozen.metrics() if self.frozen is not None else {}
        return out | self.engines.members.metrics() | {"rollout/request_retries": float(self.client.retried)}

    async def _publish(self) -> Publication:
        """One publication that at least one engine took part in to its end, waiting for restarts if there is none."""
        members = self.engines.members
        while True:
            await members.available()
            try:
                done = await self.publisher.publish(self.step, trainer_step=self.step)
            except (NoReceiverLeft, TransportLost) as error:
                self.records.table.note(first_line(error))
                continue
            self.version = self.maker.version = done.manifest.version
            if self.config.schedule.colocate:
                await self.trainers.offload()
            return done

    async def _catch_up(self) -> bool:
        """Bring the present version to engines that came back, from where it is kept; False if it is not."""
        members = self.engines.members
        try:
            stored = await in_thread(self.delivery.kept, self.version)
            if stored is None:
                return False
            publisher = self._publisher(stored, Joining(members))
            done = await publisher.publish(self.version, trainer_step=self.version)
            for name in done.engines.keys() - done.lost:
                self.records.table.note(f"engine {name} has version {self.version} from {stored}")
        except SlimxError as error:
            # Whatever it is, it is no reason to end a run whose other engines serve.
            self.records.table.note(first_line(error))
            for engine in members.joining():
                await members.quarantine(engine, error)
        return True

    def _publisher(self, source: Source, members: Members, delivery: Delivery | None = None) -> Publisher:
        options = self.config.publish
        return Publisher(
            source,
            members,
            delivery,
            deadline_s=options.deadline,
            step_deadline_s=options.step_deadline,
            staging=options.staging,
            encoding=self.encoding,
            rule=options.quantise or "none",
        )

    @asynccontextmanager
    async def trainers_turn(self) -> AsyncIterator[None]:
        """Between two steps: the trainers' state is on their devices. Colocated engines sleep meanwhile, and get the
        present version again."""
        if not self.config.schedule.colocate:
            yield
            return
        await self.engines.sleep()
        await self.trainers.reload()
        yield
        await self.trainers.offload(weights=False)
        await self.engines.wake()
        await self._publish()

    async def save(self) -> None:
        """Write a checkpoint of the present step, unless this step has one."""
        if self._saved_step == self.step:
            return
        with self.phase("save_wait"):
            await self.checkpoints.settle()
        with self.phase("save"):
            state = RunState(
                step=self.step,
                version=self.version,
                layout=layout_of(self.sizes),
                distributed_optimizer=self.config.trainer.distributed_optimizer,
                critic=layout_of(self.critic.sizes) if self.critic is not None else None,
                freeze=list(self.config.trainer.freeze),
                rollouts=self.rollouts.state(),
            )
            async with self.trainers_turn():
                await self.checkpoints.save(state)
        self._saved_step, self._saved_at = self.step, time.monotonic()

    async def finish_save(self) -> None:
        """Wait until the last checkpoint is on disk."""
        with self.phase("save_wait"):
            await self.checkpoints.settle()

    async def restore(self, path: Path, state: RunState) -> None:
        """Continue from the checkpoint in `path`."""
        await self.checkpoints.restore(path, state)
        self.step, self.version = state.step, state.version
        self._saved_step = state.step
        self.maker.version = state.version
        if isinstance(self.rollouts, Replay):
            self.rollouts.seek(state.step)
        else:
            self.rollouts.restore(state.rollouts)

    async def export(self, name: str) -> None:
        """Write the present weights as the Hugging Face directory `name` in the run's own."""
        with self.phase("export"):
            async with self.trainers_turn():
                await self.checkpoints.export(self.directory / name)

    # Records
    # -------------------------------------------------------------------------------------------------------------

    def record(self, metrics: dict[str, float], groups: list[Group], seconds: float) -> None:
        """Log a finished step, show it, and keep a few of its samples."""
        self.records.step(self.step, self.version if self.engines else None, metrics, seconds)
        due = (self.step - 1) % self.config.track.samples_every == 0 or self.step == self.config.schedule.steps
        if self.engines is not None and due:
            self._write_samples(groups, evaluation=False)

    def record_start(self, metrics: dict[str, float]) -> None:
        """Log what was measured before the first step, as step 0."""
        if metrics:
            self.records.tracker.log(0, metrics, version=self.version)

    def record_evaluation(self, metrics: dict[str, float], groups: list[Group]) -> None:
        """Keep samples of an evaluation and say its result."""
        self.records.table.note(f"step {self.step}: held-out accuracy {metrics['eval/accuracy']:.3f}")
        self._write_samples(groups, evaluation=True)

    def _drop(self, outcome: GroupOutcome) -> None:
        """Write down a group that is not trained, with its reason."""
        self.records.drops.write(drop_record(outcome, self.step + 1))

    def _write_samples(self, groups: list[Group], *, evaluation: bool) -> None:
        where = {"step": self.step, "version": self.version, "evaluation": evaluation}
        self.records.write_samples(groups, self.tokenizer, self.config.track, **where)
