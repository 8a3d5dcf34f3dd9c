"""One rollout worker as the driver sees it: its actor, its unfinished jobs, and its replacement when it is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimx.cluster.place import Actor
from slimx.cluster.restarts import Restart
from slimx.cluster.waiting import explain, gather, kill
from slimx.config.schema import Config
from slimx.config.sections.rollout import WorkerResources
from slimx.data.records import Group
from slimx.data.saved.codec import decode
from slimx.data.stored import StoredTrajectory
from slimx.errors import PartLost, SlimxError, counted, duration, first_line
from slimx.extras.rollout_workers.columns import ReportColumns
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
MAX_LOSSES = 3
"""Number of times that a group may lose its worker, and that a worker may be lost in a row without finishing a group.
Only the last of these losses decides: groups that have lost their worker once less are generated one at a time, so that
the one that is the cause is known."""
BLOCKED = "workers.blocked"
"""Code of the error about a blocked worker."""
LOST = "worker lost"
"""Drop reason for a group that lost its worker too often, because it is likely to be the cause."""


class Lost(PartLost):
    """Error for a job whose worker cannot be replaced."""

    def __init__(self, reason: SlimxError):
        super().__init__(str(reason), code=reason.code, about=reason.about)


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job that is not finished."""

    job: Job
    progress: GroupProgress
    outcome: asyncio.Future[GroupOutcome]
    losses: int = 0
    """Number of times that its worker was lost while it worked on the job, or, if the cause is known, because of the
    job."""
    sent: bool = False
    """True if the worker has the job."""


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
    ):
        """Creates the actor without starting it. `state`: returns the current state of the run. `deadline_s`: deadline
        of a start. `look`: awaited with a policy's name to look for its lost engines."""
        self.number = number
        self.name = f"rollout worker {number}"
        self.jobs: dict[int, OpenJob] = {}
        """Unfinished jobs by serial number."""
        self.requests = 0
        """Number of training requests in flight, by the worker's last report."""
        self.retried: dict[str, int] = {}
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
        state = self._state()
        self.started = await self.call("start", "the startup", self._setup, state, deadline_s=self._deadline_s)
        while state != self._state():  # it has changed during the startup
            state = self._state()
            await self.call("follow", "the current state", state)
        self._ready.set()

    async def stop(self) -> None:
        """Stops the worker. Does not raise."""
        if self._watch is not None:
            await cancelled(self._watch)
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

    async def perform(self, job: Job, progress: GroupProgress) -> GroupOutcome:
        """Makes the worker generate the group of `job`, and returns the outcome. `progress`: receives the number of
        complete rollouts."""
        open_job = OpenJob(job, progress, asyncio.get_running_loop().create_future())
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        self.jobs[job.serial] = open_job
        try:
            return await open_job.outcome
        except asyncio.CancelledError:
            self.tell("cancel", [job.serial])
            raise
        finally:
            del self.jobs[job.serial]

    def _flush(self) -> None:
        """Sends the jobs that the worker does not have, in one call. Suspects are sent one at a time, and before all
        others."""
        self._flushing = False
        if not self._ready.is_set() or self.error is not None:
            return
        unfinished = [open_job for open_job in self.jobs.values() if not open_job.outcome.done()]
        waiting = [open_job for open_job in unfinished if not open_job.sent]
        suspects = [open_job for open_job in unfinished if open_job.losses == MAX_LOSSES - 1]
        if suspects:
            waiting = suspects[:1] if len(waiting) == len(unfinished) else []
        for open_job in waiting:
            open_job.sent = True
        if waiting:
            self.tell("submit", [open_job.job for open_job in waiting])

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
        """Calls `method` like `call`, again for each replacement of the worker. Returns None if the worker cannot be
        replaced."""
        while self.error is None:
            await self._ready.wait()
            try:
                return await self.call(method, what, *arguments, deadline_s=deadline_s)
            except SlimxError:
                await asyncio.sleep(AGAIN_S)
        return None

    # Watching ---------------------------------------------------------------------------------------------------------

    async def _watched(self) -> None:
        while self.error is None:
            await self._replace(await self._until_lost())

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
            if health.blocked_s > options.worker_deadline:
                return SlimxError(
                    f"the event loop of {self.name} has been blocked for {duration(health.blocked_s)} by a hook of "
                    f"group {health.group} in {health.location}; make that call asynchronous, or run it with "
                    "asyncio.to_thread",
                    code=BLOCKED,
                    about=str(health.group),
                )
            limit = options.worker_resources.memory
            if limit is not None and health.memory > limit * 2**30:
                return SlimxError(
                    f"{self.name} uses {health.memory / 2**30:.1f} GiB, more than rollout.worker_resources.memory="
                    f"{limit:g}; correct the hook that keeps memory, or raise the limit",
                    code="workers.memory",
                    about=self.name,
                )

    async def _deliver_reports(self) -> SlimxError:
        while True:
            reported, groups = self.actor.take.remote()
            try:
                await self._deliver(await reported, groups)
            except Exception as error:
                return explain(error, "the generation of groups", self.name, self.log)

    async def _deliver(self, report: Report, groups: ray.ObjectRef) -> None:
        self.requests = report.requests
        self.retried = report.retried
        for serial, complete in report.complete.items():
            if serial in self.jobs:
                progress = self.jobs[serial].progress
                progress.remote = complete - len(progress.done)
        for loss in report.losses:
            task = asyncio.create_task(self._answer(loss))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
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

    async def _answer(self, loss: Loss) -> None:
        await self._look(loss.policy)
        self.tell("looked", loss.number)

    async def _replace(self, reason: SlimxError) -> None:
        """Starts another worker in place of a lost one, and gives it the unfinished jobs. Drops the groups of jobs that
        have lost their worker too often. If the worker cannot be replaced, `error` is set."""
        self._ready.clear()
        self._losses += 1
        await kill([self.actor])
        jobs = counted(len(self.jobs), "unfinished group")
        self._note(f"{first_line(reason)}; {self.name} is replaced, and its {jobs} continue")
        for open_job in self.jobs.values():
            job = open_job.job
            if open_job.sent and (reason.code != BLOCKED or job.group_id == reason.about):
                open_job.losses += 1
            open_job.sent = False
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
            self.error = problem
            self._ready.set()
            for open_job in self.jobs.values():
                if not open_job.outcome.done():
                    open_job.outcome.set_exception(Lost(problem))
            return
        self._flush()


def resources(options: WorkerResources, node: str | None) -> Json:
    """Returns Ray's options for a worker. `node`: id of the node of its predecessor, which is preferred, because the
    journal may be there; None to spread workers over the nodes."""
    affinity: Json = {"scheduling_strategy": "SPREAD"}
    if node is not None:
        affinity = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
    memory = {} if options.memory is None else {"memory": options.memory * 2**30}
    labels = {"label_selector": options.labels} if options.labels else {}
    return {"num_cpus": options.cpus, "num_gpus": options.gpus, **memory, **labels, **affinity}
