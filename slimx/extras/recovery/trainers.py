"""Replaces lost trainers while engines, router, buffer and driver keep running.

    a rank dies or hangs                detected by watch_ranks, or by a call that fails
      all ranks are killed              because a process group cannot lose a member
      new ranks start and load          the newest checkpoint, or the initial weights without one
      they train the steps since then   on the batches that the driver kept; every metric must be the same
      the failed call is repeated

Callers call trainers through `with_retry`, which waits during a replacement and repeats a failed call. New ranks
receive no call before they have the state of the old ones, because until then the group's actors are the dead ones.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil

from slimx.cluster.restarts import Restart
from slimx.cluster.waiting import has_died, kill
from slimx.data.batch import TrainBatch
from slimx.errors import DeadlineError, PartLost, SlimxError, counted, first_line
from slimx.extras.recovery.kill_workers import kill_on_nodes
from slimx.extras.recovery.ledger import Base, Ledger, TrainedStep, check_close, check_same
from slimx.extras.recovery.mirror_store import MirrorLost
from slimx.extras.recovery.mirrors import Mirrors
from slimx.extras.recovery.section import recovery_of
from slimx.layout.ranks import fewer
from slimx.orchestration.lifetime.hangs import keep_stacks
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.ranks.watch import local_pids, watch_ranks
from slimx.orchestration.recovery import RankLossHandler, Replan
from slimx.orchestration.state.checkpoints import Checkpointer
from slimx.orchestration.state.recording import Records
from slimx.orchestration.step.reference import reference_path, reference_step
from slimx.runtime.tasks import in_thread, race


class TrainerRecovery(RankLossHandler):
    """Handler that responds to the loss of a rank by replacing all ranks of `trainers`, up to `recovery.trainers`
    times."""

    def __init__(self, trainers: TrainerGroup, records: Records, log_dir: Path, replan: Replan | None = None):
        """Stores the parameters. `records`: records replacements; `log_dir`: directory of the mirrors' logs; `replan`:
        function that returns weight transfer plans for other parallel sizes; None if the ranks never change their
        sizes."""
        super().__init__(trainers)
        self.records = records
        self.config = trainers.config
        self.options = recovery_of(trainers.config)
        self._replan = replan
        self.limit = self.options.trainers
        self.ledger = Ledger()
        self.mirrors = Mirrors(trainers, log_dir, records.table.note)
        self.trained_again = 0
        """Number of training steps that new ranks have repeated."""
        self.from_mirrors = 0
        """Number of times that new ranks restored their state from mirrors."""
        self.replaced = 0
        """Number of times that all ranks were restarted, including failed attempts."""
        self._seconds = 0.0
        """Seconds without trainers since `metrics` was last called."""
        self._epoch = 0
        """Number of completed replacements of the group's ranks."""
        self._replacing = asyncio.Lock()
        self._checkpoints: Checkpointer | None = None
        self._final: SlimxError | None = None
        """Reason why lost ranks are no longer replaced; None as long as lost ranks are replaced."""

    async def open(self, checkpoints: Checkpointer, step: int, checkpoint: Path | None, *, same_layout: bool) -> None:
        self.ledger.rebase(Base(step, checkpoint, same_layout=same_layout))
        checkpoints.on_saved = self._saved
        await self.trainers.identify()
        self._checkpoints = checkpoints

    @property
    def checkpoints(self) -> Checkpointer:
        """Checkpoint writer, which the method `open` sets. Ranks are not replaced before it is set."""
        assert self._checkpoints is not None
        return self._checkpoints

    def _saved(self, step: int, path: Path) -> None:
        self.ledger.rebase(Base(step, path))

    def trained(self, step: int, version: int, updates: list[TrainBatch], metrics: dict[str, float]) -> None:
        """Records a completed training step; the record is kept until a checkpoint includes the step. `step`: number of
        steps completed before it; `version`: version of the engines' weights during the step."""
        self.ledger.trained(TrainedStep(step, version, updates, dict(metrics)))

    async def after_step(self, step: int, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Mirrors the state of all ranks if `recovery.mirror_every` requires it after `step`. A failure to mirror does
        not end the run. `phase`: returns a context manager that records a phase with the given name."""
        every = self.options.mirror_every
        if every and step % every == 0:
            with phase("mirror"):
                await self.with_retry(lambda: self.mirrors.take(step))

    def bases(self) -> set[int]:
        bases = {self.ledger.base.step}
        if self.mirrors.step is not None:
            bases.add(self.mirrors.step)
        return bases

    async def stop(self) -> None:
        """Ends the processes that store mirrors. Never raises an exception."""
        await self.mirrors.stop()

    def metrics(self) -> dict[str, float]:
        """Returns the `recovery/...` metrics, such as the number of replacements so far, the seconds without trainers
        since the last call, and the size of the recorded batches."""
        metrics = {
            "recovery/trainers": float(self.replaced),
            "recovery/seconds": self._seconds,
            "recovery/trained_again": float(self.trained_again),
            "recovery/from_mirrors": float(self.from_mirrors),
            "recovery/data_parallel": float(self.trainers.sizes.data),
            "recovery/kept_steps": float(len(self.ledger.steps)),
            "recovery/kept_mib": self.ledger.nbytes / 2**20,
        }
        if self.mirrors.step is not None:
            metrics["recovery/mirrored_step"] = float(self.mirrors.step)
        self._seconds = 0.0
        return metrics

    # Calls of trainers -----------------------------------------------------------------------------------------------

    async def with_retry[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """Calls `work`, which uses the trainers and can be repeated from its beginning, and returns its result. If
        ranks were lost in the meantime, the error of `work` is ignored, and `work` is repeated with new ranks."""
        while True:
            async with self._replacing:
                epoch = self._epoch
            try:
                return await work()
            except SlimxError as error:
                if self._epoch == epoch and not self._replacing.locked() and not await is_lost(self.trainers, error):
                    raise
                await self._replace(error, epoch)

    async def watch(self) -> SlimxError:
        """Watches the ranks and replaces them when one is lost. Returns the first error after which they are not
        replaced: an error that a running rank raised, or the failure of a replacement."""
        while True:
            async with self._replacing:
                epoch = self._epoch
            error = await watch_ranks(self.trainers, self.config.trainer.watch_deadline)
            try:
                if self._epoch == epoch and not await is_lost(self.trainers, error):
                    return error
                await self._replace(error, epoch)
            except SlimxError as final:
                return final

    # Replacement ------------------------------------------------------------------------------------------------------

    async def _replace(self, reason: SlimxError, epoch: int) -> None:
        """Starts new ranks. Does nothing if all ranks have been replaced in the meantime, that is, if more than `epoch`
        replacements have been completed. `reason`: error of the lost rank. Raises SlimxError if ranks cannot be
        replaced."""
        async with self._replacing:
            while self._epoch == epoch:
                if self._final is None and (self._checkpoints is None or self.replaced >= self.limit):
                    self._final = reason
                if self._final is not None:
                    raise self._final
                reason = await self._attempt(reason) or reason

    async def _attempt(self, reason: SlimxError) -> SlimxError | None:
        """Restarts all ranks because of `reason`. Returns None on success, or the new reason if the new ranks are also
        lost. Raises SlimxError if another attempt would fail in the same way."""
        self.replaced += 1
        note = self.records.table.note
        sentence = first_line(reason)
        note(f"{sentence}; restarting the trainers (restart {self.replaced} of at most {self.limit})")
        at = time.time()
        began = time.perf_counter()
        failed = "it was canceled"
        try:
            await keep_stacks(Path(self.config.run.dir), note, reason)
            again = await self._start_again()
            failed = "" if again is None else first_line(again)
            return again
        except SlimxError as problem:
            self._final = problem
            failed = first_line(problem)
            raise
        finally:
            seconds = time.perf_counter() - began
            self._seconds += seconds
            restart = Restart(part="trainers", reason=sentence, at=at, seconds=seconds, error=failed)
            self.records.trainers_replaced(restart)

    async def _start_again(self) -> SlimxError | None:
        await self._end(self.trainers)
        await self.checkpoints.interrupt()
        await self.mirrors.interrupt()
        began = time.perf_counter()
        new = self.trainers.successor()
        try:
            new = await self._placed(new)
            self.checkpoints.resize(new.sizes)
            processes = time.perf_counter() - began
            bring_back = self._bring_back(new, processes)
            again = await run_watched(new, self.config.trainer.watch_deadline, bring_back)
        except BaseException as problem:
            loss = problem if isinstance(problem, SlimxError) and await is_lost(new, problem) else None
            await self._end(new)
            self.checkpoints.resize(self.trainers.sizes)
            if loss is not None:
                return loss
            raise
        if new.sizes != self.trainers.sizes:
            # All checkpoints and mirrors were written with the old sizes.
            self.ledger.base = replace(self.ledger.base, same_layout=False)
            self.ledger.steps |= again
            await self.mirrors.stop()
        self.trainers.adopt(new)
        self.on_replaced()
        self._epoch += 1
        return None

    async def _placed(self, new: TrainerGroup) -> TrainerGroup:
        """Waits until all ranks of `new` have processes, and returns `new`. If Ray lacks resources for some ranks,
        returns a group with fewer data-parallel ranks that fits. Raises DeadlineError if none fits."""
        after = self.options.shrink_after
        try:
            await new.identify(after)
            return new
        except DeadlineError:
            if after is None or self._replan is None:
                raise
            placed = await new.placed()
            smaller = next((sizes for sizes in fewer(new.sizes) if sizes.world <= placed), None)
            if smaller is None:
                raise
        await self._end(new)
        self.records.trainers_shrunk(
            f"Ray placed only {placed} of {new.sizes.world} trainer ranks within {after:.0f} s, so the run continues "
            f"with DP{smaller.data} instead of DP{new.sizes.data} on the same batches, with another order of summation"
        )
        group = self.trainers.fewer(smaller, await in_thread(self._replan, smaller))
        try:
            await group.identify()
        except BaseException:
            await self._end(group)
            raise
        return group

    async def _bring_back(self, new: TrainerGroup, processes: float) -> dict[int, TrainedStep]:
        """Restores the new ranks to the state that the lost ranks had after their last complete step. If the parallel
        sizes of `new` differ from those of the lost ranks, returns the steps that were trained again, with their new
        metrics, by the number of steps before each; {} otherwise. `processes`: seconds that the ranks' processes took
        to start."""
        again: dict[int, TrainedStep] = {}
        clock = [time.perf_counter()]
        await new.start()
        clock.append(time.perf_counter())
        first, source = await self._load_state(new)
        every = self.config.algorithm.reference_refresh
        last = reference_step(first, every)
        if last:
            await new.refresh_reference(reference_path(Path(self.config.run.dir), last))
        clock.append(time.perf_counter())
        await self.checkpoints.write_again(new, first)
        step = first
        while step in self.ledger.steps:
            recorded = self.ledger.steps[step]
            metrics = await new.train_step(recorded.updates, step=step, version=recorded.version)
            step += 1
            self.trained_again += 1
            if new.sizes == self.trainers.sizes:
                check_same(step, recorded.metrics, metrics)
            else:
                check_close(step, recorded.metrics, metrics)
                again[step - 1] = replace(recorded, metrics=dict(metrics))  # later ranks must reproduce these metrics
            if reference_step(step, every) == step:
                await new.refresh_reference()
            await self.checkpoints.write_again(new, step)
        clock.append(time.perf_counter())
        started, loaded, trained = (late - early for early, late in pairwise(clock))
        slowest = {name: max(rank["seconds"][name] for rank in new.started) for name in new.started[0]["seconds"]}
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in ({"processes": processes} | slowest).items())
        self.records.table.note(
            f"trainers are running again after step {step}: started in {processes + started:.1f} s ({parts}), loaded "
            f"{source} in {loaded:.1f} s, trained {counted(step - first, 'step')} again in {trained:.1f} s"
        )
        return again

    async def _load_state(self, new: TrainerGroup) -> tuple[int, str]:
        """Loads the newest state into new ranks, and returns the state's step and a description of its source for
        messages. If a checkpoint must be written again, mirrors of a later step are not used, because the ranks would
        then skip the step of this checkpoint."""
        base = self.ledger.base
        unwritten_step = self.checkpoints.unwritten_step
        mirrored = self.mirrors.step
        same = new.sizes == self.trainers.sizes
        newest = math.inf if unwritten_step is None else unwritten_step
        if same and mirrored is not None and base.step < mirrored <= newest:
            try:
                await self.mirrors.restore(new)
                self.from_mirrors += 1
                return mirrored, f"the mirrors of step {mirrored}"
            except MirrorLost as error:
                self.records.table.note(f"{first_line(error)}; trainers restart from the newest checkpoint instead")
        if base.checkpoint is not None:
            same = same and base.same_layout
            await new.restore(base.checkpoint, same_layout=same, load_optimizer=True)
        return base.step, str(base.checkpoint or "the initial weights")

    async def _end(self, group: TrainerGroup) -> None:
        """Kills all ranks of `group`, including ranks that hang or are stopped."""
        local = local_pids(group)
        pids: defaultdict[str | None, list[int]] = defaultdict(list)
        for rank, started in enumerate(group.started):
            pids[None if rank in local else started["node"]].append(started["pid"])
        group.started = []  # the process ids may be reused later
        await kill_on_nodes(pids, "the lost trainers")
        await kill(group.actors)


async def run_watched[T](group: TrainerGroup, deadline_s: float, work: Awaitable[T]) -> T:
    """Awaits `work` and returns its result. Raises the error of a rank of `group` if a rank is lost before `work` is
    done. `deadline_s`: seconds after which a rank that is stopped, or does not respond between calls, counts as
    lost."""
    watch = asyncio.ensure_future(watch_ranks(group, deadline_s))
    task, _ = await race(work, watch)
    if task is not None:
        return task.result()
    raise watch.result()


async def is_lost(group: TrainerGroup, error: SlimxError) -> bool:
    """Returns True if `error` was caused by a rank of `group` that has died, hangs or does not respond; False if a
    running rank raised it."""
    ranks = [group.holder(rank) for rank in range(group.sizes.world)]
    if isinstance(error, PartLost) and error.about in ranks:
        return True
    if isinstance(error, DeadlineError) and any(holder in ranks for holder in error.holder.split(", ")):
        return True
    return _stopped(group) or await has_died(*group.actors)


def _stopped(group: TrainerGroup) -> bool:
    for pid in local_pids(group).values():
        with suppress(psutil.Error):
            if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return True
    return False
