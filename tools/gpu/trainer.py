"""One trainer rank in another process, without Ray, and its weights as the source of a publication."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from slimx.errors import DeadlineError
from slimx.reshard.manifest import Manifest
from slimx.reshard.pack.packer import describe
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.packed import PackedBucket
from slimx.reshard.plan.copy_plan import Plan
from slimx.trainer.worker import TrainerWorker

PUBLISH = "publish"
"""Name of the plan of publications."""
CALL_S = 60.0
"""Deadline of one operation, in seconds."""


class _Process(BaseManager):
    """The process of the worker."""


_Process.register("worker", TrainerWorker)


class Trainer:
    """The only rank of a run. All calls come from one thread, as Ray calls an actor."""

    def __init__(self, config: Config, plan: Plan, log: Path, device: str):
        """Starts the process, which writes all of its output to `log`. `plan`: plan of the publications."""
        self.config, self.log, self.device, self.buckets = config, log, device, PlannedBuckets(plan)
        self._process = _Process(ctx=multiprocessing.get_context("spawn"))
        self._process.start()
        self._thread = ThreadPoolExecutor(1)
        self._worker: Any = None

    async def start(self, deadline_s: float) -> dict[str, Any]:
        """Builds the model and loads its weights; returns the result of `TrainerWorker.start`."""
        values = self.config.model_dump(mode="json")
        self._worker = await self._run(
            deadline_s, "worker", lambda: self._process.worker(0, values, str(self.log), self.device, ["model"])
        )
        where = await self._run(deadline_s, "rendezvous", self._worker.rendezvous)
        started = await self._run(deadline_s, "start", lambda: self._worker.start(where))
        plan, on_device = self.buckets.plan.to_bytes(), self.config.publish.on_device
        arguments = {"name": PUBLISH, "plan": plan, "remote": [], "on_device": on_device}
        await self._run(deadline_s, "prepare", lambda: self._worker.call("weights.prepare", **arguments))
        return started

    async def call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        """Calls an operation of the worker, "role.method", and returns its result. Raises DeadlineError after `CALL_S`
        seconds."""
        return await self._run(CALL_S, method, lambda: self._worker.call(method, *arguments, **named))

    async def _run(self, deadline_s: float, method: str, work: Any) -> Any:
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._thread, work), deadline_s)
        except TimeoutError:
            raise DeadlineError(method, deadline_s, f"the trainer (log {self.log})") from None

    def stop(self) -> None:
        """Stops the process."""
        self._process.shutdown()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # slimx.reshard.parties.Source ---------------------------------------------------------------------------------

    async def begin(self, manifest: Manifest) -> None:
        """Does nothing: weights are gathered without preparation."""

    async def forms(self) -> list[dict[str, str]]:
        """Returns the name and form of every tensor, by engine rank."""
        return self.buckets.forms()

    async def bucket_count(self) -> int:
        """Returns the number of buckets."""
        return self.buckets.plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        """Packs one bucket in the worker's memory."""
        opened = await self.call("weights.open", name=PUBLISH, bucket=bucket)
        paths = [opened[part] for part in sorted(opened)]
        share = await self.call("weights.fill", name=PUBLISH, bucket=bucket, paths=paths)
        return describe(self.buckets.form(bucket), paths, [share])

    async def release(self, bucket: int | None = None) -> None:
        """Releases the memory of a bucket; None: of the whole publication, which has ended."""
        await self.call("weights.release", name=PUBLISH, bucket=bucket)
