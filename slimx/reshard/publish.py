"""Publication: the trainers' weights become a new version in every engine, proven equal; an engine that fails is out.

    source     gather 0   gather 1   gather 2  ...
    delivery              bring 0    bring 1   ...
    engines    begin      stage 0    stage 1   ...   then each on its own: pause, load, verify, commit, resume, admit

Where source and engines share devices, the source leaves them between the last commit and the first resume.

Engines serve while buckets are staged, and before its first copy an abort changes nothing in an engine. From the first
copy on it is DIRTY and serves nothing until everything that it holds is verified. With `staging = "bucket"` each bucket
is copied as it comes: two buckets of memory instead of a whole model, but engines are paused from the beginning.

A failure belongs to an engine: one that refuses, dies or misses a deadline is quarantined and the others go on. A
failure of the trainers ends the publication. Engines and trainers are given as protocols (`slimx.reshard.parties`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

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
"""Seconds that engines and trainers get to drop what they hold of a publication that has failed."""


class Publisher:
    """Publishes versions of one policy, one at a time."""

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
        """`delivery`: None has engines open buckets where the source has gathered them. `deadline_s`: seconds for a
        whole publication; `step_deadline_s`: for one call to one engine. `vacate`: frees devices that source and
        engines share; awaited when all engines hold the version, before the first of them takes the rest of its
        memory."""
        self.source, self.members, self.delivery, self.staging = source, members, delivery or Delivery(), staging
        self.deadline_s, self.step_deadline_s = deadline_s, step_deadline_s
        self.policy, self.encoding, self.rule = policy, encoding, rule
        self.vacate = vacate
        self.checked: dict[str, int] = {}
        """By engine the incarnation whose list of tensors was compared with the source's."""
        self._under_way: int | None = None

    async def publish(self, version: int, *, trainer_step: int) -> Publication:
        """Bring the trainers' present weights into every engine as `version`.

        Raises NoReceiverLeft if no engine got them, TransportLost if what carries them died, SlimxError if the trainers
        failed or an engine holds another model. A second call while one is under way is refused.
        """
        if self._under_way is not None:
            raise SlimxError(
                f"version {version} cannot be published while the publication of version {self._under_way} is under "
                "way; wait for it",
                code="publish.under_way",
                about=f"version {version}",
            )
        self._under_way = version
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
            self._under_way = None


class _EngineDropped(Exception):
    """The engine has left this publication; its quarantine has begun."""


class _Attempt:
    """One publication under way."""

    def __init__(self, publisher: Publisher, manifest: Manifest):
        self.publisher, self.source, self.members = publisher, publisher.source, publisher.members
        self.delivery = publisher.delivery
        self.manifest, self.epoch = manifest, manifest.membership_epoch
        self.active = list(self.members.candidates())
        self.incarnations = {recipient.name: recipient.incarnation for recipient in self.active}
        self.out = Publication(manifest, {recipient.name: EngineOutcome() for recipient in self.active})
        self.ends = asyncio.get_running_loop().time() + publisher.deadline_s
        self._running: dict[str, tuple[int, float]] = {}
        """By stage how many calls are in it, and since when."""

    async def run(self) -> Publication:
        by_bucket = self.publisher.staging == "bucket"
        try:
            with self._timed("total"):
                self._someone_left()
                await self._check_tensors()
                await self._of_trainers("begin", self.source.begin(self.manifest))
                count = await self._of_trainers("begin", self.source.bucket_count())
                await self._of_trainers("begin", self.delivery.begin(self.manifest, count))
                await self._each("begin", self._begin)
                if by_bucket:
                    await self._each("pause")
                await self._stage(count, load=by_bucket)
                self.out.wire = self.delivery.wire
                await self._switch(load=not by_bucket)
        except BaseException:
            await self._give_up()
            raise
        if self.publisher.vacate is None:
            await self._of_trainers("release", self._end())
        return self.out

    # Stages -----------------------------------------------------------------------------------------------------------

    async def _check_tensors(self) -> None:
        """Names, shapes and dtypes of all tensors against each engine's own list, before it is sent the first byte."""
        with self._timed("check"):
            sent = await self._of_trainers("check", self.source.forms())
        checked = self.publisher.checked
        new = [recipient for recipient in self.active if checked.get(recipient.name) != recipient.incarnation]
        with self._timed("check"):
            encoding = self.manifest.encoding
            asked = (self._call(recipient, "inventory", encoding) for recipient in new)
            lists = await self._together(asked)
        for recipient, known in zip(new, lists, strict=True):
            if known is not None:
                _compare(recipient.name, sent, known)
                checked[recipient.name] = recipient.incarnation

    async def _begin(self, recipient: Recipient) -> None:
        await self.delivery.connect(recipient, self.epoch)
        await recipient.perform("begin", self.epoch, self.manifest, self.publisher.staging)

    async def _stage(self, count: int, *, load: bool) -> None:
        """All buckets through all engines: one is staged while the next is gathered."""
        coming: asyncio.Task[tuple[PackedBucket, bool]] | None = asyncio.create_task(self._gather(0))
        try:
            for bucket in range(count):
                packed, held = await coming
                coming = asyncio.create_task(self._gather(bucket + 1)) if bucket + 1 < count else None
                bring = partial(self.delivery.bring, epoch=self.epoch, packed=packed, bucket=bucket)
                await self._each("stage", bring)
                if load:
                    await self._each("load")
                if held and (load or packed.on_device):  # engines have copies of what is on a device
                    await self._of_trainers("release", self.source.release(bucket))
                self.out.nbytes += packed.nbytes
                self.out.tensors += len(packed.tensors)
                self.out.buckets += 1
        finally:
            await cancelled(coming)

    async def _gather(self, bucket: int) -> tuple[PackedBucket, bool]:
        """A bucket as engines get it, and True while the source holds its memory."""
        with self._timed("gather"):
            gathered = await self._of_trainers("gather", self.source.gather(bucket))
            taken = await self._of_trainers("gather", self.delivery.take(gathered, bucket))
            if taken is gathered:
                return taken, True
            await self._of_trainers("gather", self.source.release(bucket))
            return taken, False

    async def _switch(self, *, load: bool) -> None:
        """From staged to serving, each engine at its own pace: another one that hangs does not keep it paused. Those
        that share devices with the source wait for each other, because the source leaves once."""
        if (vacate := self.publisher.vacate) is None:
            await self._together(self._take_and_serve(recipient, load=load) for recipient in self.active)
            return
        await self._together(self._take(recipient, load=load) for recipient in self.active)
        await self._of_trainers("release", self._end())
        await self._of_trainers("release", vacate())
        await self._together(self._serve(recipient) for recipient in self.active)

    async def _take_and_serve(self, recipient: Recipient, *, load: bool) -> None:
        await self._take(recipient, load=load)
        await self._serve(recipient)

    async def _take(self, recipient: Recipient, *, load: bool) -> None:
        """Have an engine hold all that was staged, proven and stamped."""
        if load:
            await self._call(recipient, "pause")
            await self._call(recipient, "load")
        count = (await self._call(recipient, "verify"))["checked"]
        if count != self.out.tensors:
            await self._drop(
                recipient,
                SlimxError(
                    f"engine {recipient.name} verified {count} of {self.out.tensors} tensors of version "
                    f"{self.manifest.version}",
                    code="publish.unverified",
                    about=recipient.name,
                ),
            )
        self.out.engines[recipient.name].tensors = count
        await self._call(recipient, "commit", self.manifest.version)

    async def _serve(self, recipient: Recipient) -> None:
        """Let requests reach an engine that has taken the version."""
        await self._call(recipient, "resume")
        try:
            await self.members.admit(recipient)
        except SlimxError as error:
            await self._drop(recipient, error)

    # Calls ------------------------------------------------------------------------------------------------------------

    async def _each(self, step: str, work: Callable[[Recipient], Awaitable[None]] | None = None) -> None:
        """The same step of every engine that is left: its verb, or `work` with it."""
        await self._together(
            self._call(recipient, step) if work is None else self._timely(recipient, step, partial(work, recipient))
            for recipient in self.active
        )

    async def _together[T](self, calls: Iterator[Awaitable[T]]) -> list[T | None]:
        """Results of all calls, None for an engine that was dropped. One that fails waits for the others: none may run
        on into an abort."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, _EngineDropped):
                raise result
        self._someone_left()
        return [None if isinstance(result, _EngineDropped) else result for result in results]

    async def _call(self, recipient: Recipient, verb: str, *arguments: object) -> Any:
        """One verb of one engine."""
        return await self._timely(recipient, verb, partial(recipient.perform, verb, self.epoch, *arguments))

    async def _timely[T](self, recipient: Recipient, step: str, work: Callable[[], Awaitable[T]]) -> T:
        """One step of one engine within its deadline. An engine that fails is dropped."""
        self.out.engines[recipient.name].step = step
        if recipient.incarnation != self.incarnations[recipient.name]:
            again = f"engine {recipient.name} was started again during {self.manifest}"
            await self._drop(recipient, ReceiverLost(again, code="engine.restarted", about=recipient.name))
        if not self._left():  # the time was spent before this engine was asked
            raise DeadlineError(
                f"publication of version {self.manifest.version}",
                self.publisher.deadline_s,
                f"all that came before step {step} of engine {recipient.name}",
            )
        seconds = self.publisher.step_deadline_s
        try:
            with self._timed({"inventory": "check", "resume": "commit"}.get(step, step)):
                async with asyncio.timeout(seconds):
                    return await work()
        except TimeoutError:
            error = ReceiverLost(
                f"engine {recipient.name} did not answer {step} of {self.manifest} within {seconds:.0f} s",
                code="engine.silent",
                about=recipient.name,
            )
        except TransportLost:  # no engine's fault
            raise
        except SlimxError as problem:
            error = problem
        await self._drop(recipient, error)

    async def _drop(self, recipient: Recipient, error: SlimxError) -> None:
        self.active.remove(recipient)
        self.out.engines[recipient.name].error = error
        self.out.engines[recipient.name].tensors = 0
        if recipient.incarnation == self.incarnations[recipient.name]:
            await self.members.quarantine(recipient, error)
        raise _EngineDropped

    async def _of_trainers[T](self, stage: str, work: Awaitable[T]) -> T:
        """Wait for the trainers, not beyond the publication's deadline."""
        try:
            async with asyncio.timeout(self._left()):
                return await work
        except TimeoutError:
            raise DeadlineError(
                f"publication of version {self.manifest.version}, stage {stage}",
                self.publisher.deadline_s,
                "the trainers",
            ) from None

    async def _end(self) -> None:
        await self.source.release()
        await self.delivery.end()

    async def _give_up(self) -> None:
        """Best effort, and not for long: the error that stopped the publication is the one to tell."""
        drops = [*(recipient.perform("abort", self.epoch) for recipient in self.active), self._end()]
        with contextlib.suppress(TimeoutError):
            limit = min(self.publisher.deadline_s, ABORT_S)
            await asyncio.wait_for(asyncio.gather(*drops, return_exceptions=True), limit)

    def _someone_left(self) -> None:
        """Raise if no engine is left: to be tried again, when those that were lost or refused are started again."""
        if self.active:
            return
        outcomes = self.out.engines
        which = f"version {self.manifest.version}"
        if not outcomes:
            raise NoReceiverLeft(f"{which} cannot be published: no engine runs", code="publish.no_engine", about=which)
        told = "; ".join(str(outcome.error) for outcome in outcomes.values())
        steps = {outcome.step for outcome in outcomes.values()}
        if len(steps) == 1 and not any(isinstance(outcome.error, ReceiverLost) for outcome in outcomes.values()):
            step = steps.pop()
            raise NoReceiverLeft(
                f"{which} was refused by every engine, step {step}: {told}", code="publish.refused", about=step
            )
        raise NoReceiverLeft(f"{which} reached no engine: {told}", code="publish.lost", about=which)

    def _left(self) -> float:
        return max(0.0, self.ends - asyncio.get_running_loop().time())

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Add the block's time to `stage`; of blocks that overlap (several engines), the union."""
        inside, since = self._running.get(stage, (0, time.perf_counter()))
        self._running[stage] = inside + 1, since
        try:
            yield
        finally:
            inside, since = self._running.pop(stage)
            if inside > 1:
                self._running[stage] = inside - 1, since
            else:
                seconds = self.out.seconds
                seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - since


def _compare(engine: str, sent: list[dict[str, str]], known: list[dict[str, str]]) -> None:
    """Refuse a model that is not the trainers': restarting the engine would not help."""
    if len(sent) != len(known):
        raise SlimxError(
            f"engine {engine} has {len(known)} ranks to load tensors into, the trainer sends to {len(sent)}; the "
            "engine was started with other sizes than this run's configuration",
            code="publish.ranks",
            about=engine,
        )
    for rank, (outgoing, held) in enumerate(zip(sent, known, strict=True)):
        where = f"engine {engine}" + (f" rank {rank}" if len(sent) > 1 else "")
        for tensor, form in outgoing.items():
            if tensor not in held:
                raise SlimxError(
                    f"{where} has no tensor {tensor}; it loads another model", code="publish.unknown", about=tensor
                )
            if held[tensor] != form:
                raise SlimxError(
                    f"{where} holds {tensor} as {held[tensor]}, the trainer sends {form}",
                    code="publish.form",
                    about=tensor,
                )
        if missing := sorted(held.keys() - outgoing.keys()):
            raise SlimxError(
                f"{where} loads {missing[0]}, which the trainer does not have ({len(missing)} such tensors)",
                code="publish.missing",
                about=missing[0],
            )
