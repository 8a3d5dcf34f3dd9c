"""Replaces lost trainers while engines, router, buffer and driver go on.

    a rank dies, or stands still        watch_ranks, or the call that it breaks
      all ranks are killed              a process group cannot lose one member
      new ranks start, and load         the newest checkpoint, else the initial weights
      they train the steps since then   on the batches that the driver kept; every metric must be what it was
      the call that broke is made again

Whoever needs trainers asks for them by `lasting`, which waits while they are being replaced and makes a call that broke
again. Nothing reaches new ranks before they are where the old ones were: until then the group's actors are the dead
ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil

from slimx.cluster.restarts import Restart
from slimx.cluster.waiting import first_line, has_died, kill
from slimx.data.batch import TrainBatch
from slimx.errors import DeadlineError, PartLost, SlimxError
from slimx.extras.recovery.fence import fence
from slimx.extras.recovery.ledger import Base, Ledger, TrainedStep, check_close, check_same
from slimx.extras.recovery.mirror_store import MirrorLost
from slimx.extras.recovery.mirrors import Mirrors
from slimx.layout.ranks import fewer
from slimx.orchestration.lifetime.hangs import keep_stacks
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.ranks.watch import local_pids, watch_ranks
from slimx.orchestration.recovery import Recovery, Replan
from slimx.orchestration.state.checkpoints import Checkpointer
from slimx.orchestration.state.recording import Records
from slimx.orchestration.step.reference import reference_path, reference_step
from slimx.runtime.tasks import in_thread, race


class TrainerRecovery(Recovery):
    """Replaces the ranks of `trainers`, up to `recovery.trainers` times."""

    def __init__(self, trainers: TrainerGroup, records: Records, log_dir: Path, replan: Replan | None = None):
        """`replan`: None where there will be no ranks of other sizes."""
        super().__init__(trainers)
        self.records, self.config, self._replan = records, trainers.config, replan
        self.limit = self.config.recovery.trainers
        self.ledger = Ledger()
        self.mirrors = Mirrors(trainers, log_dir, records.table.note)
        self.trained_again = self.from_mirrors = 0
        """Steps that new ranks trained again, and times that they took their state from mirrors."""
        self.replaced = 0
        """Times that all ranks were started again, those counted that failed."""
        self._seconds = 0.0
        """Seconds of outages since the metrics were last asked for."""
        self._epoch = 0
        """Counts the worlds of ranks."""
        self._replacing = asyncio.Lock()
        self._checkpoints: Checkpointer | None = None
        self._final: SlimxError | None = None
        """Reason for which no rank is replaced any more."""

    async def open(self, checkpoints: Checkpointer, step: int, checkpoint: Path | None, *, same_layout: bool) -> None:
        self.ledger.rebase(Base(step, checkpoint, same_layout=same_layout))
        checkpoints.on_saved = self._saved
        await self.trainers.identify()
        self._checkpoints = checkpoints

    def _saved(self, step: int, path: Path) -> None:
        self.ledger.rebase(Base(step, path))

    def trained(self, step: int, version: int, updates: list[TrainBatch], metrics: dict[str, float]) -> None:
        """Keep the step until a checkpoint holds it."""
        self.ledger.trained(TrainedStep(step, version, updates, dict(metrics)))

    async def after_step(self, step: int, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Have the state of all ranks kept in memory elsewhere, if that is due. That it cannot be ends nothing."""
        every = self.config.recovery.mirror_every
        if every and step % every == 0:
            with phase("mirror"):
                await self.lasting(lambda: self.mirrors.take(step))

    def bases(self) -> set[int]:
        return {self.ledger.base.step} | ({self.mirrors.step} if self.mirrors.step is not None else set())

    async def stop(self) -> None:
        """End what keeps mirrors; does not raise."""
        await self.mirrors.stop()

    def metrics(self) -> dict[str, float]:
        """Replacements so far, seconds without trainers since the last call, and what the driver keeps of batches."""
        seconds, self._seconds = self._seconds, 0.0
        return {
            "recovery/trainers": float(self.replaced),
            "recovery/seconds": seconds,
            "recovery/trained_again": float(self.trained_again),
            "recovery/from_mirrors": float(self.from_mirrors),
            **({} if self.mirrors.step is None else {"recovery/mirrored_step": float(self.mirrors.step)}),
            "recovery/data_parallel": float(self.trainers.sizes.data),
            "recovery/kept_steps": float(len(self.ledger.steps)),
            "recovery/kept_mib": self.ledger.nbytes / 2**20,
        }

    # Whoever needs trainers -------------------------------------------------------------------------------------------

    async def lasting[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, which calls trainers and may be done again from its beginning. What it raises counts
        unless ranks were lost meanwhile: then it is done again with new ones."""
        while True:
            async with self._replacing:
                epoch = self._epoch
            try:
                return await work()
            except SlimxError as error:
                if self._epoch == epoch and not self._replacing.locked() and not await lost(self.trainers, error):
                    raise
                await self._replace(error, epoch)

    async def watch(self) -> SlimxError:
        """Watch the ranks and replace them; returns why that is not possible any more."""
        while True:
            async with self._replacing:
                epoch = self._epoch
            error = await watch_ranks(self.trainers, self.config.trainer.watch_deadline)
            try:
                if self._epoch == epoch and not await lost(self.trainers, error):
                    return error
                await self._replace(error, epoch)
            except SlimxError as final:
                return final

    # Replacement ------------------------------------------------------------------------------------------------------

    async def _replace(self, reason: SlimxError, epoch: int) -> None:
        """Bring up new ranks in place of those of `epoch`, unless that has been done. Raises SlimxError if it cannot
        be."""
        async with self._replacing:
            while self._epoch == epoch:
                if self._final is None and (self._checkpoints is None or self.replaced >= self.limit):
                    self._final = reason
                if self._final is not None:
                    raise self._final
                reason = await self._attempt(reason) or reason

    async def _attempt(self, reason: SlimxError) -> SlimxError | None:
        """Start all ranks again because of `reason`; returns why the new ones were lost, too. Raises what another
        attempt would meet again."""
        self.replaced += 1
        note, told = self.records.table.note, first_line(reason)
        note(f"{told}: trainers are started again, {self.replaced} of {self.limit}")
        at, began, failed = time.time(), time.perf_counter(), "it was given up"
        try:
            await keep_stacks(Path(self.config.run.dir), note, reason)
            again = await self._start_again()
            failed = "" if again is None else first_line(again)
            return again
        except SlimxError as problem:
            self._final, failed = problem, first_line(problem)
            raise
        finally:
            seconds = time.perf_counter() - began
            self._seconds += seconds
            self.records.trainers_replaced(Restart(part="trainers", reason=told, at=at, seconds=seconds, error=failed))

    async def _start_again(self) -> SlimxError | None:
        await self._end(self.trainers)
        await self._checkpoints.interrupt()
        await self.mirrors.interrupt()
        began = time.perf_counter()
        new = self.trainers.successor()
        try:
            new = await self._placed(new)
            self._checkpoints.resize(new.sizes)
            processes = time.perf_counter() - began
            again = await watched(new, self.config.trainer.watch_deadline, self._bring_back(new, processes))
        except BaseException as problem:
            lose = isinstance(problem, SlimxError) and await lost(new, problem)
            await self._end(new)
            self._checkpoints.resize(self.trainers.sizes)
            if lose:
                return problem
            raise
        if new.sizes != self.trainers.sizes:
            # Every checkpoint so far is one of the old sizes, and so is every mirror.
            self.ledger.base = replace(self.ledger.base, same_layout=False)
            self.ledger.steps |= again
            await self.mirrors.stop()
        self.trainers.adopt(new)
        self.on_replaced()
        self._epoch += 1
        return None

    async def _placed(self, new: TrainerGroup) -> TrainerGroup:
        """`new` once all its ranks have processes; where places for some are lacking, a group with as few data-parallel
        ranks as there are places for. Raises DeadlineError if none fits."""
        after = self.config.recovery.shrink_after
        try:
            await new.identify(after)
            return new
        except DeadlineError:
            there = 0 if after is None or self._replan is None else await new.placed()
            smaller = next((sizes for sizes in fewer(new.sizes) if sizes.world <= there), None)
            if smaller is None:
                raise
        await self._end(new)
        self.records.trainers_shrunk(
            f"within {after:.0f} s {there} of {new.sizes.world} trainer ranks had found a place: the run goes on with "
            f"DP{smaller.data} instead of DP{new.sizes.data}, on the same batches; sums are added in another order"
        )
        group = self.trainers.fewer(smaller, await in_thread(self._replan, smaller))
        try:
            await group.identify()
        except BaseException:
            await self._end(group)
            raise
        return group

    async def _bring_back(self, new: TrainerGroup, processes: float) -> dict[int, TrainedStep]:
        """Bring new ranks, whose processes came up in `processes` seconds, to the state that the lost ones had between
        two steps; the steps that ranks of other sizes trained, by the number of steps before each, with their metrics.
        """
        again: dict[int, TrainedStep] = {}
        clock = [time.perf_counter()]
        await new.start()
        clock.append(time.perf_counter())
        first, source = await self._load_state(new)
        every = self.config.algorithm.reference_refresh
        if last := reference_step(first, every):
            await new.refresh_reference(reference_path(Path(self.config.run.dir), last))
        clock.append(time.perf_counter())
        await self._checkpoints.write_again(new, first)
        step = first
        while (kept := self.ledger.steps.get(step)) is not None:
            metrics = await new.train_step(kept.updates, step=step, version=kept.version)
            step += 1
            self.trained_again += 1
            if new.sizes == self.trainers.sizes:
                check_same(step, kept.metrics, metrics)
            else:
                check_close(step, kept.metrics, metrics)
                again[step - 1] = replace(kept, metrics=dict(metrics))  # those that later ranks must have
            if reference_step(step, every) == step:
                await new.refresh_reference()
            await self._checkpoints.write_again(new, step)
        started, loaded, trained = (late - early for early, late in pairwise([*clock, time.perf_counter()]))
        slowest = {name: max(rank["seconds"][name] for rank in new.started) for name in new.started[0]["seconds"]}
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in ({"processes": processes} | slowest).items())
        self.records.table.note(
            f"trainers are back after step {step}: started in {processes + started:.1f} s ({parts}), loaded "
            f"{source} in {loaded:.1f} s, trained {step - first} steps again in {trained:.1f} s"
        )
        return again

    async def _load_state(self, new: TrainerGroup) -> tuple[int, str]:
        """Have new ranks load the newest state that there is; its step, and its name. A mirror that is beyond a save
        which has to be written again is of no use: new ranks would not pass the save's step."""
        base, unwritten = self.ledger.base, self._checkpoints.unwritten
        mirrored = self.mirrors.step
        same = new.sizes == self.trainers.sizes
        if same and mirrored is not None and mirrored > base.step and (unwritten is None or mirrored <= unwritten):
            try:
                await self.mirrors.restore(new)
                self.from_mirrors += 1
                return mirrored, f"the mirrors of step {mirrored}"
            except MirrorLost as error:
                self.records.table.note(f"{first_line(error)}; trainers begin from the newest checkpoint")
        if base.checkpoint is not None:
            same = same and base.same_layout
            await new.restore(base.checkpoint, same_layout=same, load_optimizer=True)
        return base.step, str(base.checkpoint or "the initial weights")

    async def _end(self, group: TrainerGroup) -> None:
        """Have no rank of `group` run, whatever state it is in."""
        here, pids = local_pids(group), defaultdict(list)
        for rank, started in enumerate(group.started):
            pids[None if rank in here else started["node"]].append(started["pid"])
        group.started = []  # their numbers may be others' next time
        await fence(pids, "the lost trainers")
        await kill(group.actors)


async def watched[T](group: TrainerGroup, deadline_s: float, work: Awaitable[T]) -> T:
    """The result of `work`. Raises why a rank of `group` is lost, if that comes first."""
    task, watch = await race(work, watch_ranks(group, deadline_s))
    if task is None:
        raise watch.result()
    return task.result()


async def lost(group: TrainerGroup, error: SlimxError) -> bool:
    """True if `error` comes of a rank of `group` that has died, stands still or does not answer; not if a rank that is
    well raised it."""
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
