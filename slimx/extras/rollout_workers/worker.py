"""Ray actor that generates groups: an event loop with hooks, tools, agents' server, rewards and clients of the engines.

    driver -- submit(jobs) --> a task per group, by the same `GroupMaker` that runs in the driver of a run without
           <-- take() -------- workers; outcomes in the order of their ends, and the encoded groups as an object of Ray

The driver owns the second result of `take`, so the groups remain when this process dies. They reach the processes that
read them without passing through the driver.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from pathlib import Path

import psutil
import ray

from slimx.config.schema import CHECKED, Config
from slimx.data.saved.codec import decode, encode
from slimx.data.stored import summarize
from slimx.engines.outage import Outage
from slimx.errors import PartLost, SlimxError, raised
from slimx.extras.rollout_workers.columns import ReportStore
from slimx.extras.rollout_workers.journal import JournalFile, merged, read_journals
from slimx.extras.rollout_workers.making import make_maker
from slimx.extras.rollout_workers.messages import Finished, Groups, Health, Job, Loss, Report, Setup, State
from slimx.json_types import Json
from slimx.orchestration.lifetime.hangs import GilWatch, location_of
from slimx.rollout.client.generation import GenerationClient
from slimx.rollout.flow.progress import GroupProgress, SavedRollout
from slimx.runtime.ports import machine
from slimx.trainer.process import redirect_output

BATCH_S = 0.01
"""Seconds for which a report waits for further events, so that a burst of events costs the driver one call."""
REPORT_S = 2.0
"""Maximum number of seconds between two reports."""
BATCH_BYTES = 16 * 2**20
"""Size of the encoded groups above which a report contains no further group, because they are fetched together."""
BEAT_S = 0.5
"""Seconds between two signs of life of the event loop."""
STOP_S = 5.0
"""Seconds that cancelled jobs have to end."""
LOOK = "look"
"""Concurrency group of Ray, a thread of its own, in which `look` runs."""
GROUP: ContextVar[str | None] = ContextVar("slimx_group", default=None)
"""Id of the group that the current task generates."""


async def _nothing() -> None: ...


class RolloutWorker:
    """Ray actor of one rollout worker."""

    def __init__(self, number: int, config: Json, log_path: str):
        """Redirects all output of the process to `log_path`; `start` performs the rest of the setup. `config`: a
        `Config` dumped to JSON values."""
        redirect_output(log_path)
        self.number = number
        self.config = Config.model_validate(config, context=CHECKED)
        self._stack = AsyncExitStack()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Task of each unfinished job, by serial number."""
        self._progress: dict[int, GroupProgress] = {}
        """Progress of each unfinished training job, by serial number."""
        self._reported: dict[int, int] = {}
        """Number of complete rollouts of each unfinished job that has been reported."""
        self._done: deque[tuple[Finished, ReportStore]] = deque()
        self._delivered: list[int] = []
        """Serial numbers of the jobs in the previous report."""
        self._cancelled: set[int] = set()
        """Serial numbers of jobs that were cancelled before they were submitted."""
        self._followed = -1
        """Number of the newest state of the run that the worker follows."""
        self._losses: list[Loss] = []
        self._looked: dict[int, asyncio.Event] = {}
        """Events that are set when the driver has looked for lost engines, by number of the loss."""
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._beat = 0.0
        """Time of the event loop's last sign of life, by its own clock."""

    # Life -------------------------------------------------------------------------------------------------------------

    async def start(self, setup: Setup, state: State) -> Json:
        """Loads the hooks and the tokenizers and opens the clients. Returns the process id, the machine and the Ray
        node id."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        earlier = [Path(path) for path in setup.earlier]
        self._saved = read_journals(earlier)
        self._journal = JournalFile(Path(setup.journal), self._saved)
        self._outages = {policy: Outage() for policy in setup.endpoints}
        self.maker = await make_maker(self.config, setup, self._outages, self._lost, self._stack)
        await self.maker.gate.close(_nothing, 0.0)
        await self.follow(state)
        for path in earlier:
            path.unlink(missing_ok=True)
        self._gil = self._stack.enter_context(GilWatch(self.config.rollout.worker_deadline))
        self._live()
        return {"pid": os.getpid(), "machine": machine(), "node": ray.get_runtime_context().get_node_id()}

    async def stop(self) -> None:
        """Cancels all jobs, stops the processes of hooks, and removes the journal."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        self.maker.close()
        await self._stack.aclose()
        self._journal.close()

    def _live(self) -> None:
        self._beat = self._loop.time()
        self._gil.put_off()
        self._loop.call_later(BEAT_S, self._live)

    @ray.method(concurrency_group=LOOK)
    async def look(self) -> Health:
        """Returns the state of the process. Runs in a thread of its own, which responds while a hook blocks the event
        loop."""
        blocked_s = max(0.0, self._loop.time() - self._beat - BEAT_S)
        task = asyncio.current_task(self._loop)
        return Health(
            blocked_s=blocked_s,
            group=None if task is None else task.get_context().get(GROUP),
            location=location_of(self._thread),
            memory=psutil.Process().memory_info().rss,
        )

    # Jobs -------------------------------------------------------------------------------------------------------------

    async def submit(self, jobs: Sequence[Job]) -> None:
        """Starts to generate the groups of `jobs`."""
        for job in jobs:
            if job.serial in self._cancelled:
                self._cancelled.discard(job.serial)
                self._journal.forget(job.serial)
            else:
                self._tasks[job.serial] = asyncio.create_task(self._run(job))

    async def cancel(self, serials: Sequence[int]) -> None:
        """Cancels jobs, which are then not reported."""
        for serial in serials:
            task = self._tasks.pop(serial, None)
            if task is None:  # not submitted yet, or finished
                self._cancelled.add(serial)
            else:
                task.cancel()
                self._journal.forget(serial)

    async def progress(self) -> dict[int, bytes]:
        """Returns the encoded progress (list of `SavedRollout`) of all unfinished training jobs, by serial number."""
        return {serial: encode(progress.save()) for serial, progress in self._progress.items()}

    async def _run(self, job: Job) -> None:
        GROUP.set(job.group_id)
        store = ReportStore()
        try:
            for policy, version in job.versions.items():
                self.maker.versions[policy] = max(version, self.maker.versions[policy])
            progress = None
            if job.evaluation is None:
                progress = self._progress[job.serial] = self._journal.progress(job.serial, self._begun(job))
            outcome = await self.maker.make(
                job.prompt, group_id=job.group_id, number=job.number, evaluation=job.evaluation, progress=progress
            )
            group = summarize(outcome.group, store.store)
            done = Finished(serial=job.serial, group=group, reason=outcome.reason, detail=outcome.detail)
        except Exception as error:
            done = Finished(serial=job.serial, error=_portable(error, job.group_id))
        finally:
            self._progress.pop(job.serial, None)
            self._reported.pop(job.serial, None)
        if self._tasks.pop(job.serial, None) is not None:
            self._done.append((done, store))
            self._changed.set()

    def _begun(self, job: Job) -> list[SavedRollout]:
        """Returns the rollouts from which the group continues."""
        saved = [] if job.saved is None else decode(list[SavedRollout], job.saved)
        return merged(saved, self._saved.pop(job.serial, [])) if job.again else saved

    # Reports ----------------------------------------------------------------------------------------------------------

    @ray.method(num_returns=2)
    async def take(self) -> tuple[Report, Groups]:
        """Returns the events since the previous call, and the encoded groups of the jobs that they finish. Waits up to
        `REPORT_S` seconds for an event."""
        try:
            async with asyncio.timeout(REPORT_S):
                await self._changed.wait()
            await asyncio.sleep(BATCH_S)
        except TimeoutError:
            pass
        for serial in self._delivered:  # this call shows that the driver has the previous report
            self._journal.forget(serial)
        self._delivered.clear()
        self._changed.clear()
        report = Report(requests=self.maker.gate.out, losses=self._losses)
        self._losses = []
        for serial, progress in self._progress.items():
            if progress.complete != self._reported.get(serial, 0):
                self._reported[serial] = report.complete[serial] = progress.complete
        for name, policy in self.maker.policies.items():
            if isinstance(policy.client, GenerationClient):
                report.retried[name] = policy.client.retried
        groups: Groups = []
        size = 0
        while self._done and size < BATCH_BYTES:
            done, store = self._done.popleft()
            report.finished.append(done)
            self._delivered.append(done.serial)
            size += store.nbytes
            store.move_to(groups)
        if self._done:
            self._changed.set()
        return report, groups

    async def _lost(self, policy: str) -> None:
        """Waits until the driver has looked for lost engines of `policy`."""
        number = next(self._numbers)
        looked = self._looked[number] = asyncio.Event()
        self._losses.append(Loss(policy, number))
        self._changed.set()
        await looked.wait()

    async def looked(self, number: int) -> None:
        """Continues the request of loss `number`, because the driver has looked for lost engines."""
        looked = self._looked.pop(number, None)
        if looked is not None:  # else it was asked by a lost process of this worker
            looked.set()

    # State of the run -------------------------------------------------------------------------------------------------

    async def follow(self, state: State) -> None:
        """Follows the run's state. Only `close_gate` closes the gate."""
        if state.number < self._followed:
            return
        self._followed = state.number
        self.maker.begun |= state.begun
        if state.open:
            self.maker.gate.open()
        for policy, outage in self._outages.items():
            if policy in state.outages:
                outage.begin()
            else:
                outage.end()

    async def close_gate(self, number: int, deadline_s: float) -> None:
        """Holds back requests of training rollouts, and waits for those in flight, which the driver makes the engines
        end. Abandons them after `deadline_s` seconds. `number`: that of the run's state."""
        self._followed = max(number, self._followed)
        await self.maker.gate.close(_nothing, deadline_s)


def _portable(error: Exception, group: str) -> SlimxError:
    """Returns an error of a class that every process can unpickle."""
    if not isinstance(error, SlimxError):
        return SlimxError(raised(error), code="workers.job", about=group)
    kind = PartLost if isinstance(error, PartLost) else SlimxError
    return kind(str(error), code=error.code, about=error.about)
