"""One rollout worker as the driver sees it: its actor, its unfinished jobs, and its replacement when it is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from slimx.cluster.place import Actor
from slimx.cluster.restarts import Restart
from slimx.cluster.waiting import explain, gather, kill
from slimx.config.schema import Config
from slimx.data.records import Group
from slimx.data.saved.codec import decode
from slimx.data.stored import StoredTrajectory
from slimx.errors import SlimxError, counted, first_line
from slimx.extras.rollout_workers.columns import ReportColumns
from slimx.extras.rollout_workers.health import BLOCKED, ailment, resources
from slimx.extras.rollout_workers.jobs import LOST, MAX_LOSSES, Lost, OpenJob
from slimx.extras.rollout_workers.messages import Health, Job, Loss, Report, Setup, State
from slimx.extras.rollout_workers.worker import LOOK, RolloutWorker
from slimx.json_types import Json
from slimx.rollout.flow.progress import GroupProgress, SavedRollout
from slimx.rollout.flow.rollouts import GroupOutcome
from slimx.runtime.logs import begin_log
from slimx.runtime.tasks import cancelled

LOOK_S = 5.0
"""Maximum number of seconds between two looks at a worker's state."""
STOP_S = 15.0
"""Seconds within which a worker must stop before its process is killed."""
CALLS = 1000
"""Maximum number of calls that a worker executes at once; those that wait for something occupy their place."""
AGAIN_S = 1.0
"""Seconds before a call that failed is repeated, within which the loss of the worker is noticed."""


class Member:
    """A rollout worker of a run, which is replaced when it dies, is blocked, or uses too much memory."""

    def __init__(
        self,
        number: int,
        config: Config,
        setup: Setup,
        state: Callable[[], State],
        log_dir: Path,
        *,
        deadline_s: float,
        note: Callable[[str], None],
        record: Callable[[Restart], None],
        look: Callable[[str], Awaitable[None]],
        retried: Callable[[str, int], None],
    ):
        """Creates the actor without starting it. `state`: returns the current state of the run. `deadline_s`: deadline
        of a start. `look`: awaited with a policy's name to look for its lost engines. `retried`: called with a
        policy's name and the number of requests that were sent again."""
        self.number = number
        self.name = f"rollout worker {number}"
        self.jobs: dict[int, OpenJob] = {}
        """Unfinished jobs by serial number."""
        self.requests = 0
        """Number of training requests in flight, by the worker's last report."""
        self.log = log_dir / f"rollout-worker-{number}.log"
        self.started: Json = {}
        """Process id, machine and Ray node id of the worker, from its last start."""
        self.error: SlimxError | None = None
        """Reason why the worker cannot be replaced; None while it can."""
        self.patience_s = config.rollout.worker_deadline
        """Seconds within which the worker must respond."""
        self._config = config
        self._setup = setup
        self._state = state
        self._deadline_s = deadline_s
        self._note = note
        self._record = record
        self._look = look
        self._retried = retried
        self._counted: dict[str, int] = {}
        """Number of retried requests by policy, by the last report of the current process."""
        self._starts = 0
        """Number of processes so far."""
        self._earlier: list[str] = []
        """Journals of processes that no later process has read."""
        self._flushing = False
        """True if `_flush` is called at the end of the event loop's current iteration."""
        self._ready = asyncio.Event()
        self._losses = 0
        self._watch: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self.actor = self._create()

    def _create(self) -> Actor:
        begin_log(self.log)
        # The annotations of Ray 2.60 lack the option.
        remote: Actor = ray.remote(concurrency_groups={LOOK: 1})(RolloutWorker)  # type: ignore[call-overload]
        options = resources(self._config.rollout.worker_resources, self.started.get("node"))
        actor = remote.options(max_concurrency=CALLS, **options)
        return actor.remote(self.number, self._config.model_dump(mode="json"), str(self.log))

    async def start(self) -> None:
        """Starts the worker; from then on it is watched, and replaced if it is lost."""
        await self._begin()
        self._watch = asyncio.create_task(self._watched())

    async def _begin(self) -> None:
        journal = Path(self._setup.journal)
        self._starts += 1
        path = str(journal.with_stem(f"{journal.stem}-{self._starts}"))
        setup = replace(self._setup, journal=path, earlier=tuple(self._earlier))
        self._earlier.append(path)
        state = self._state()
        self.started = await self.call("start", "the startup", setup, state, deadline_s=self._deadline_s)
        self._earlier = [path]
        while state != self._state():  # it has changed during the startup
            state = self._state()
            await self.call("follow", "the current state", state)
        if not state.open:
            await self.call("close_gate", "the interruption", state.number, 0.0)
        self._ready.set()

    async def stop(self) -> None:
        """Stops the worker. Does not raise."""
        if self._watch is not None:
            await cancelled(self._watch, *self._answers)
        for open_job in self.jobs.values():
            open_job.outcome.cancel()
        with suppress(SlimxError):
            await self.call("stop", "the end", deadline_s=STOP_S)
        await kill([self.actor])

    async def call(self, method: str, what: str, *arguments: object, deadline_s: float | None = None) -> Any:
        """Calls `method` of the worker and returns its result. `what`: the operation, for errors."""
        (result,) = await gather(
            [getattr(self.actor, method).remote(*arguments)],
            what=f"{what} of {self.name}",
            holders=[self.name],
            deadline_s=deadline_s or self.patience_s,
            logs=[self.log],
        )
        return result

    def tell(self, method: str, *arguments: object) -> None:
        """Calls `method` of the worker without waiting for it."""
        if self._ready.is_set():
            getattr(self.actor, method).options(num_returns=0).remote(*arguments)

    # Jobs -------------------------------------------------------------------------------------------------------------

    @property
    def suspicious(self) -> bool:
        """True while groups that may have killed the worker are generated one at a time."""
        return any(open_job.suspected for open_job in self.jobs.values())

    async def perform(self, job: Job, progress: GroupProgress) -> GroupOutcome:
        """Makes the worker generate the group of `job`, and returns the outcome. `progress`: receives the number of
        complete rollouts."""
        open_job = OpenJob(job, progress, asyncio.get_running_loop().create_future())
        self.jobs[job.serial] = open_job
        self._flush_soon()
        try:
            return await open_job.outcome
        except asyncio.CancelledError:
            self.tell("cancel", [job.serial])
            raise
        finally:
            del self.jobs[job.serial]
            self._flush_soon()  # the job may have been the suspect for whose end others wait

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Sends the jobs that the worker does not have, in one call. Suspects are sent one at a time, and before all
        others."""
        self._flushing = False
        if not self._ready.is_set() or self.error is not None:
            return
        unfinished = [open_job for open_job in self.jobs.values() if not open_job.outcome.done()]
        waiting = [open_job for open_job in unfinished if not open_job.sent]
        suspects = [open_job for open_job in unfinished if open_job.suspected]
        if suspects:
            waiting = suspects[:1] if len(waiting) == len(unfinished) else []
        for open_job in waiting:
            open_job.sent = True
        if waiting:
            self._start_task(self._submit(waiting))

    async def _submit(self, jobs: Sequence[OpenJob]) -> None:
        """Sends jobs to the worker. If the worker is alive but cannot receive them, the jobs raise the error."""
        actor = self.actor
        try:
            await self.call("submit", "the start of groups", [open_job.job for open_job in jobs])
        except Exception as error:
            await asyncio.sleep(AGAIN_S)
            if actor is self.actor and self._ready.is_set() and not await self._dead(actor):
                for open_job in jobs:
                    if not open_job.outcome.done():
                        open_job.outcome.set_exception(error)

    async def _dead(self, actor: Actor) -> bool:
        """Returns True if the process of `actor` has ended or does not respond."""
        try:
            await self.call("look", "a sign of life")
        except SlimxError:
            return True
        return actor is not self.actor

    def _start_task(self, work: Coroutine[object, None, None]) -> None:
        task = asyncio.create_task(work)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def collect(self) -> None:
        """Copies the progress of all unfinished training jobs from the worker."""
        if not self.jobs:
            return
        found: dict[int, bytes] = await self.insist("progress", "the collection of unfinished rollouts") or {}
        for serial, data in found.items():
            open_job = self.jobs.get(serial)
            if open_job is not None:
                saved = GroupProgress.restore(decode(list[SavedRollout], data))
                open_job.progress.done = saved.done
                open_job.progress.journals = saved.journals
                open_job.progress.remote = 0

    async def insist(self, method: str, what: str, *arguments: object, deadline_s: float | None = None) -> Any:
        """Calls `method` like `call`, and again for the successor of a worker that is lost meanwhile. Returns None if
        the worker cannot be replaced. Raises the error of a worker that is not lost."""
        while True:
            await self._ready.wait()
            if self.error is not None:
                return None
            actor = self.actor
            try:
                return await self.call(method, what, *arguments, deadline_s=deadline_s)
            except SlimxError:
                noticed_by = time.monotonic() + self.patience_s + 2 * LOOK_S
                while actor is self.actor and self._ready.is_set():
                    if time.monotonic() > noticed_by:
                        raise
                    await asyncio.sleep(AGAIN_S)

    async def if_ready(self, method: str, what: str, *arguments: object, deadline_s: float | None = None) -> None:
        """Calls `method` like `insist`, unless the worker is being replaced: its successor begins with the state."""
        if self._ready.is_set():
            await self.insist(method, what, *arguments, deadline_s=deadline_s)

    # Watching ---------------------------------------------------------------------------------------------------------

    async def _watched(self) -> None:
        try:
            while self.error is None:
                await self._replace(await self._until_lost())
        except Exception as error:
            self._give_up(explain(error, "the replacement", self.name, self.log))

    async def _until_lost(self) -> SlimxError:
        """Delivers the worker's reports until it is lost, and returns the reason."""
        tasks = {asyncio.create_task(self._deliver_reports()), asyncio.create_task(self._look_at_health())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            await cancelled(*tasks)

    async def _look_at_health(self) -> SlimxError:
        """Returns when the worker does not respond, or when its state requires that it is replaced."""
        options = self._config.rollout
        while True:
            await asyncio.sleep(min(LOOK_S, self.patience_s / 2))
            try:
                health: Health = await self.call("look", "a sign of life")
            except SlimxError as error:
                return error
            problem = ailment(health, self.name, options)
            if problem is not None:
                return problem

    async def _deliver_reports(self) -> SlimxError:
        while True:
            try:
                reported, groups = self.actor.take.remote()
                await self._deliver(await reported, groups)
            except Exception as error:
                return explain(error, "the generation of groups", self.name, self.log)

    async def _deliver(self, report: Report, groups: ray.ObjectRef) -> None:
        self.requests = report.requests
        for policy, count in report.retried.items():
            self._retried(policy, count - self._counted.get(policy, 0))
            self._counted[policy] = count
        for serial, complete in report.complete.items():
            if serial in self.jobs:
                progress = self.jobs[serial].progress
                progress.remote = complete - len(progress.done)
        for loss in report.losses:
            self._start_task(self._answer(loss, self.actor))
        if not report.finished:
            return
        self._losses = 0
        for done in report.finished:
            open_job = self.jobs.get(done.serial)
            if open_job is None or open_job.outcome.done():
                continue
            if done.group is None:
                open_job.outcome.set_exception(done.error or AssertionError("a job without an outcome"))
                continue
            for trajectory in done.group.trajectories:
                if isinstance(trajectory, StoredTrajectory) and isinstance(trajectory.columns, ReportColumns):
                    trajectory.columns.reference = groups
            open_job.outcome.set_result(GroupOutcome(done.group, done.reason, done.detail))
        self._flush()

    async def _answer(self, loss: Loss, actor: Actor) -> None:
        try:
            await self._look(loss.policy)
        finally:
            actor.looked.options(num_returns=0).remote(loss.number)

    async def _replace(self, reason: SlimxError) -> None:
        """Starts another worker in place of a lost one, and gives it the unfinished jobs. Drops the groups of jobs that
        have lost their worker too often. If the worker cannot be replaced, `error` is set."""
        self._ready.clear()
        self._losses += 1
        self.requests = 0
        self._counted.clear()
        await kill([self.actor])
        jobs = counted(len(self.jobs), "unfinished group")
        self._note(f"{first_line(reason)}; {self.name} is replaced, and continues its {jobs}")
        for open_job in self.jobs.values():
            job = open_job.job
            if open_job.sent and (reason.code != BLOCKED or job.group_id == reason.about):
                open_job.losses += 1
            open_job.sent = False
            open_job.progress.remote = 0
            open_job.job = replace(job, again=True)
            if open_job.losses == MAX_LOSSES and not open_job.outcome.done():
                self._losses = 0
                group = Group(id=job.group_id, prompt=job.prompt, trajectories=[])
                detail = f"its rollout worker was lost {open_job.losses} times: {first_line(reason)}"
                open_job.outcome.set_result(GroupOutcome(group, LOST, detail))
        at = time.time()
        clock = time.perf_counter()
        problem = reason
        if self._losses <= MAX_LOSSES:
            try:
                self.actor = self._create()
                await self._begin()
            except SlimxError as error:
                problem = error
        failed = "" if self._ready.is_set() else first_line(problem)
        seconds = time.perf_counter() - clock
        self._record(Restart(part=self.name, reason=first_line(reason), at=at, seconds=seconds, error=failed))
        if failed:
            await kill([self.actor])
            self._give_up(problem)
        self._flush()

    def _give_up(self, reason: SlimxError) -> None:
        """Ends the attempts to replace the worker; its jobs raise Lost."""
        self.error = reason
        self._ready.set()
        for open_job in self.jobs.values():
            if not open_job.outcome.done():
                open_job.outcome.set_exception(Lost(reason))
