"""Publishes the trainers' weights as a new, verified version in every engine; engines that fail are dropped.

    source     gather 0   gather 1   gather 2  ...
    delivery              bring 0    bring 1   ...
    engines    begin      stage 0    stage 1   ...   then each separately: pause, load, verify, commit, resume, admit

If source and engines share devices, the source frees them between the last commit and the first resume.

Engines serve while buckets are staged, and an abort before the first copy does not change an engine. From the first
copy on an engine is DIRTY and does not serve until all its weights are verified. With `staging = "bucket"` each bucket
is copied as it arrives: this takes two buckets of memory instead of a whole model, but pauses engines from the start.

An engine that refuses, dies or misses a deadline is quarantined, and the publication continues with the others. A
failure of the trainers ends the publication. `slimx.reshard.parties` defines the interfaces of engines and trainers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.manifest import Encoding, EngineOutcome, Manifest, Publication
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import (
    Delivery,
    Members,
    NoReceiverLeft,
    ReceiverLost,
    Recipient,
    Source,
    Staging,
    TransportLost,
)
from slimx.runtime.tasks import cancelled

ABORT_S = 10.0
"""Time limit in seconds for engines and trainers to drop the data of a failed publication."""


class Publisher:
    """Publishes versions of one policy's weights, one at a time."""

    def __init__(
        self,
        source: Source,
        members: Members,
        delivery: Delivery | None = None,
        *,
        deadline_s: float,
        step_deadline_s: float,
        staging: Staging = "model",
        policy: str = "actor",
        encoding: Encoding = "hf",
        rule: str = "none",
        vacate: Callable[[], Awaitable[None]] | None = None,
    ):
        """Configures the publications of one policy.

        `delivery`: None makes engines open buckets in the source's memory. `deadline_s`: time limit in seconds for a
        publication; `step_deadline_s`: for one step on one engine. `staging`: when engines copy weights into the model.
        `rule`: quantization rule for the manifest. `vacate`: frees devices that source and engines share; awaited after
        all engines have committed, before any reallocates its memory; None if none are shared."""
        self.source = source
        self.members = members
        self.delivery = delivery or Delivery()
        self.staging = staging
        self.deadline_s = deadline_s
        self.step_deadline_s = step_deadline_s
        self.policy = policy
        self.encoding = encoding
        self.rule = rule
        self.vacate = vacate
        self.checked: dict[str, int] = {}
        """Engine -> its incarnation when its tensors were last compared with the source's; a restarted engine is
        compared again."""
        self._current: int | None = None
        """Version that is being published; None between publications."""

    async def publish(self, version: int, *, trainer_step: int) -> Publication:
        """Publishes the source's current weights to every engine as `version`; returns the publication's record.

        Raises NoReceiverLeft if no engine received them, TransportLost if the transport failed, and SlimxError if the
        trainers failed, an engine has a different model, or another publication is running."""
        if self._current is not None:
            raise SlimxError(
                f"version {version} cannot be published while version {self._current} is being published; "
                "wait until that publication has ended",
                code="publish.under_way",
                about=f"version {version}",
            )
        self._current = version
        try:
            manifest = Manifest(
                policy=self.policy,
                version=version,
                encoding=self.encoding,
                rule=self.rule,
                trainer_step=trainer_step,
                membership_epoch=self.members.epoch,
            )
            return await _Attempt(self, manifest).run()
        finally:
            self._current = None


class _EngineDropped(Exception):
    """Raised to stop the work for one engine after it was dropped from this publication and quarantined."""


class _Attempt:
    """State of a running publication."""

    def __init__(self, publisher: Publisher, manifest: Manifest):
        self.publisher = publisher
        self.source = publisher.source
        self.members = publisher.members
        self.delivery = publisher.delivery
        self.manifest = manifest
        self.epoch = manifest.membership_epoch
        self.active = list(self.members.candidates())
        self.incarnations = {recipient.name: recipient.incarnation for recipient in self.active}
        self.out = Publication(manifest, {recipient.name: EngineOutcome() for recipient in self.active})
        self.ends = asyncio.get_running_loop().time() + publisher.deadline_s
        self._running: dict[str, tuple[int, float]] = {}
        """Stage -> number of running calls in that stage, and start time of the first one (`time.perf_counter`)."""

    async def run(self) -> Publication:
        by_bucket = self.publisher.staging == "bucket"
        try:
            with self._timed("total"):
                self._require_engines()
                await self._check_tensors()
                await self._by_deadline("begin", self.source.begin(self.manifest))
                count = await self._by_deadline("begin", self.source.bucket_count())
                await self._by_deadline("begin", self.delivery.begin(self.manifest, count))
                await self._on_engines("begin", self._begin)
                if by_bucket:
                    await self._on_engines("pause")
                await self._stage(count, load=by_bucket)
                self.out.wire = self.delivery.wire
                await self._switch(load=not by_bucket)
        except BaseException:
            await self._give_up()
            raise
        if self.publisher.vacate is None:
            await self._by_deadline("release", self._end())
        return self.out

    # Stages -----------------------------------------------------------------------------------------------------------

    async def _check_tensors(self) -> None:
        """Compares the tensors to be sent with those that engines load; skips engines checked since their start."""
        with self._timed("check"):
            sent = await self._by_deadline("check", self.source.forms())
        checked = self.publisher.checked
        new = [recipient for recipient in self.active if checked.get(recipient.name) != recipient.incarnation]
        with self._timed("check"):
            encoding = self.manifest.encoding
            inventories = await self._together(self._call(recipient, "inventory", encoding) for recipient in new)
        for recipient, inventory in zip(new, inventories, strict=True):
            if inventory is not None:
                _compare(recipient.name, sent, inventory)
                checked[recipient.name] = recipient.incarnation

    async def _begin(self, recipient: Recipient) -> None:
        await self.delivery.connect(recipient, self.epoch)
        await recipient.perform("begin", self.epoch, self.manifest, self.publisher.staging)

    async def _stage(self, count: int, *, load: bool) -> None:
        """Sends `count` buckets to all engines, gathering each while the previous one is staged. `load`: True makes
        engines copy each bucket into the model before the next one is staged."""
        gathering = asyncio.create_task(self._gather(0))
        try:
            for bucket in range(count):
                packed, in_source = await gathering
                if bucket + 1 < count:
                    gathering = asyncio.create_task(self._gather(bucket + 1))
                bring = partial(self.delivery.bring, epoch=self.epoch, packed=packed, bucket=bucket)
                await self._on_engines("stage", bring)
                if load:
                    await self._on_engines("load")
                if in_source and (load or packed.on_device):  # engines have copied the bucket instead of mapping it
                    await self._by_deadline("release", self.source.release(bucket))
                self.out.nbytes += packed.nbytes
                self.out.tensors += len(packed.tensors)
                self.out.buckets += 1
        finally:
            await cancelled(gathering)

    async def _gather(self, bucket: int) -> tuple[PackedBucket, bool]:
        """Returns a bucket as engines will receive it, and True if the source's memory still contains it."""
        with self._timed("gather"):
            gathered = await self._by_deadline("gather", self.source.gather(bucket))
            taken = await self._by_deadline("gather", self.delivery.take(gathered, bucket))
            if taken is gathered:
                return taken, True
            await self._by_deadline("gather", self.source.release(bucket))
            return taken, False

    async def _switch(self, *, load: bool) -> None:
        """Makes engines load (if `load` is True), verify, commit and serve the staged weights. Each engine proceeds on
        its own, so that one that hangs does not keep others paused; but engines that share devices with the source wait
        for each other after the commit, as the source frees all devices at once."""
        vacate = self.publisher.vacate
        if vacate is None:
            await self._together(self._take_and_serve(recipient, load=load) for recipient in self.active)
            return
        await self._together(self._take(recipient, load=load) for recipient in self.active)
        await self._by_deadline("release", self._end())
        await self._by_deadline("release", vacate())
        await self._together(self._serve(recipient) for recipient in self.active)

    async def _take_and_serve(self, recipient: Recipient, *, load: bool) -> None:
        await self._take(recipient, load=load)
        await self._serve(recipient)

    async def _take(self, recipient: Recipient, *, load: bool) -> None:
        """Makes one engine verify and commit the staged weights; if `load` is True, first pauses the engine and makes
        it load them."""
        if load:
            await self._call(recipient, "pause")
            await self._call(recipient, "load")
        count = (await self._call(recipient, "verify"))["checked"]
        if count != self.out.tensors:
            await self._drop(
                recipient,
                SlimxError(
                    f"engine {recipient.name} verified only {count} of the {self.out.tensors} published tensors of "
                    f"version {self.manifest.version}; restart the engine",
                    code="publish.unverified",
                    about=recipient.name,
                ),
            )
        self.out.engines[recipient.name].tensors = count
        await self._call(recipient, "commit", self.manifest.version)

    async def _serve(self, recipient: Recipient) -> None:
        """Resumes an engine that has committed the version and adds it to the router."""
        await self._call(recipient, "resume")
        try:
            await self.members.admit(recipient)
        except SlimxError as error:
            await self._drop(recipient, error)

    # Calls ------------------------------------------------------------------------------------------------------------

    async def _on_engines(self, step: str, work: Callable[[Recipient], Awaitable[None]] | None = None) -> None:
        """Runs a step on every remaining engine: `work(engine)` if given, otherwise `Receiver`'s method `step`."""
        if work is None:
            await self._together(self._call(recipient, step) for recipient in self.active)
        else:
            await self._together(self._timely(recipient, step, partial(work, recipient)) for recipient in self.active)

    async def _together[T](self, calls: Iterator[Awaitable[T]]) -> list[T | None]:
        """Awaits all calls and returns their results, None for engines that were dropped. Any other error is raised
        after all calls have ended, so that none of them continues while the publication is aborted."""
        results: list[T | None] = []
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, _EngineDropped):
                results.append(None)
            elif isinstance(result, BaseException):
                raise result
            else:
                results.append(result)
        self._require_engines()
        return results

    async def _call(self, recipient: Recipient, verb: str, *arguments: object) -> Any:
        """Makes one engine perform `verb`, a method of `Receiver`, within the step's deadline; returns the result."""
        return await self._timely(recipient, verb, partial(recipient.perform, verb, self.epoch, *arguments))

    async def _timely[T](self, recipient: Recipient, step: str, work: Callable[[], Awaitable[T]]) -> T:
        """Awaits `work()`, one step on one engine, for at most `step_deadline_s` seconds. Drops the engine if the step
        fails or exceeds that time."""
        self.out.engines[recipient.name].step = step
        if recipient.incarnation != self.incarnations[recipient.name]:
            problem = f"engine {recipient.name} was restarted during the publication of {self.manifest}"
            await self._drop(recipient, ReceiverLost(problem, code="engine.restarted", about=recipient.name))
        if not self._left():
            raise DeadlineError(
                f"the publication of version {self.manifest.version}",
                self.publisher.deadline_s,
                f"the steps that precede {step} of engine {recipient.name}",
            )
        seconds = self.publisher.step_deadline_s
        try:
            with self._timed({"inventory": "check", "resume": "commit"}.get(step, step)):
                async with asyncio.timeout(seconds):
                    return await work()
        except TimeoutError:
            limit = f"{seconds:.0f} s (publish.engine_deadline)"
            message = f"engine {recipient.name} did not finish step {step} of {self.manifest} within {limit}"
            failure: SlimxError = ReceiverLost(message, code="engine.silent", about=recipient.name)
        except TransportLost:  # the engine did not cause it
            raise
        except SlimxError as error:
            failure = error
        await self._drop(recipient, failure)

    async def _drop(self, recipient: Recipient, error: SlimxError) -> NoReturn:
        self.active.remove(recipient)
        self.out.engines[recipient.name].error = error
        self.out.engines[recipient.name].tensors = 0
        if recipient.incarnation == self.incarnations[recipient.name]:
            await self.members.quarantine(recipient, error)
        raise _EngineDropped

    async def _by_deadline[T](self, stage: str, work: Awaitable[T]) -> T:
        """Awaits `work` by the trainers or the transport. Raises DeadlineError if the publication's deadline passes."""
        try:
            async with asyncio.timeout(self._left()):
                return await work
        except TimeoutError:
            raise DeadlineError(
                f"the publication of version {self.manifest.version}, stage {stage}",
                self.publisher.deadline_s,
                "the trainers",
            ) from None

    async def _end(self) -> None:
        await self.source.release()
        await self.delivery.end()

    async def _give_up(self) -> None:
        """Makes engines and trainers drop the publication's data; waits at most ABORT_S seconds and ignores errors."""
        drops = [*(recipient.perform("abort", self.epoch) for recipient in self.active), self._end()]
        with contextlib.suppress(TimeoutError):
            limit = min(self.publisher.deadline_s, ABORT_S)
            await asyncio.wait_for(asyncio.gather(*drops, return_exceptions=True), limit)

    def _require_engines(self) -> None:
        """Raises NoReceiverLeft, with every engine's error, if no engine is left."""
        if self.active:
            return
        outcomes = self.out.engines
        version = f"version {self.manifest.version}"
        if not outcomes:
            message = f"{version} cannot be published, because no engine is running; see the engines' logs"
            raise NoReceiverLeft(message, code="publish.no_engine", about=version)
        reasons = "; ".join(str(outcome.error) for outcome in outcomes.values())
        steps = {outcome.step for outcome in outcomes.values()}
        if len(steps) == 1 and not any(isinstance(outcome.error, ReceiverLost) for outcome in outcomes.values()):
            step = steps.pop()
            message = f"every engine refused {version} in step {step}: {reasons}"
            raise NoReceiverLeft(message, code="publish.refused", about=step)
        raise NoReceiverLeft(f"no engine received {version}: {reasons}", code="publish.lost", about=version)

    def _left(self) -> float:
        return max(0.0, self.ends - asyncio.get_running_loop().time())

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Adds the block's duration to the total for `stage`. Overlapping blocks, of several engines, count once."""
        calls, start = self._running.get(stage, (0, time.perf_counter()))
        self._running[stage] = calls + 1, start
        try:
            yield
        finally:
            calls, start = self._running.pop(stage)
            if calls > 1:
                self._running[stage] = calls - 1, start
            else:
                seconds = self.out.seconds
                seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


def _compare(engine: str, sent: list[dict[str, str]], loaded: list[dict[str, str]]) -> None:
    """Raises SlimxError if the tensors in `sent` and `loaded`, both in the format of `Source.forms`, differ. This error
    ends the publication, because restarting the engine would not help."""
    if len(sent) != len(loaded):
        raise SlimxError(
            f"engine {engine} has {len(loaded)} ranks instead of {len(sent)}; start the engine "
            "with the parallel sizes of this run's rollout.engines",
            code="publish.ranks",
            about=engine,
        )
    remedy = "start the engine with the trainers' model"
    for rank, (sent_tensors, engine_tensors) in enumerate(zip(sent, loaded, strict=True)):
        name = f"engine {engine} rank {rank}" if len(sent) > 1 else f"engine {engine}"
        for tensor, form in sent_tensors.items():
            if tensor not in engine_tensors:
                raise SlimxError(f"{name} has no tensor {tensor}; {remedy}", code="publish.unknown", about=tensor)
            if engine_tensors[tensor] != form:
                raise SlimxError(
                    f"{name} has tensor {tensor} as {engine_tensors[tensor]}, but the trainers send {form}; {remedy}",
                    code="publish.form",
                    about=tensor,
                )
        missing = sorted(engine_tensors.keys() - sent_tensors.keys())
        if missing:
            raise SlimxError(
                f"{name} needs tensor {missing[0]}, which no trainer sends (missing tensors: {len(missing)}); {remedy}",
                code="publish.missing",
                about=missing[0],
            )
