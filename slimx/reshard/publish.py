"""Publication: the trainers' weights become a new version in every engine, proven equal, or the run stops.

    for each bucket: gather, stage (bytes verified in the engine's staging) -> pause -> load in place -> verify what the
    engine holds -> commit (version set) -> resume

Engines serve while buckets are staged. Before the first copy an abort changes nothing. From the first copy an engine is
DIRTY and serves nothing until a complete publication is verified. This room knows no engine and no trainer: it is given
both as the protocols below.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.packed import PackedBucket

ABORT_S = 10.0
"""Seconds that the engines get to drop what is staged when a publication has failed."""


class Source(Protocol):
    """The trainers."""

    async def tensors(self) -> dict[str, str]:
        """Every tensor that will be sent: name -> "dtype:d0,d1"."""
        ...

    async def bucket_count(self) -> int: ...

    async def gather(self, bucket: int) -> PackedBucket: ...

    async def release(self) -> None: ...


class Receiver(Protocol):
    """One engine."""

    name: str

    async def inventory(self) -> dict[str, str]:
        """Every tensor that the engine loads, in the form of `Source.tensors`."""
        ...

    async def pause(self) -> None: ...

    async def stage(self, packed: PackedBucket, bucket: int) -> None: ...

    async def abort(self) -> None: ...

    async def load(self) -> None: ...

    async def verify(self) -> int: ...

    async def commit(self, version: int) -> None: ...

    async def resume(self) -> None: ...


@dataclass(slots=True)
class Publication:
    """What one publication did."""

    version: int
    tensors: int = 0
    """Tensors verified in every engine."""
    nbytes: int = 0
    """Bytes sent to each engine."""
    buckets: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage: check (the first time), gather, stage, pause, load, verify, commit."""


class Publisher:
    """Publishes versions, one at a time. A failed publication leaves engines paused or DIRTY and raises."""

    def __init__(self, source: Source, receivers: Sequence[Receiver], deadline_s: float):
        self.source, self.receivers, self.deadline_s = source, list(receivers), deadline_s
        self._checked: set[str] = set()
        """Receivers whose list of tensors was compared with the source's."""
        self._stage = "start"

    async def publish(self, version: int) -> Publication:
        """Bring the trainers' present weights into every engine as `version`."""
        try:
            return await asyncio.wait_for(self._publish(version), self.deadline_s)
        except TimeoutError:
            engines = ", ".join(receiver.name for receiver in self.receivers)
            raise DeadlineError(
                f"publication of version {version}, stage {self._stage}", self.deadline_s, f"engines {engines}"
            ) from None

    async def _publish(self, version: int) -> Publication:
        out = Publication(version)
        async with _Stage(self, out, "check"):
            await self._check_tensors()
        try:
            for bucket in range(await self.source.bucket_count()):
                async with _Stage(self, out, "gather"):
                    packed = await self.source.gather(bucket)
                async with _Stage(self, out, "stage"):
                    await self._all("stage", packed, bucket)
                out.nbytes += packed.size
                out.tensors += len(packed.tensors)
                out.buckets += 1
            async with _Stage(self, out, "pause"):
                await self._all("pause")
            async with _Stage(self, out, "load"):
                await self._all("load")
            async with _Stage(self, out, "verify"):
                counts = await self._all("verify")
            for receiver, count in zip(self.receivers, counts, strict=True):
                if count != out.tensors:
                    raise SlimxError(
                        f"engine {receiver.name} verified {count} of {out.tensors} tensors of version {version}; "
                        "it must not serve: restart it"
                    )
            async with _Stage(self, out, "commit"):
                await self._all("commit", version)
                await self._all("resume")
        except BaseException:
            # Best effort, and not for long: the error that stopped the publication is the one to tell.
            with contextlib.suppress(TimeoutError):
                aborts = asyncio.gather(*(receiver.abort() for receiver in self.receivers), return_exceptions=True)
                await asyncio.wait_for(aborts, min(self.deadline_s, ABORT_S))
            raise
        finally:
            await self.source.release()
        return out

    async def _all(self, action: str, *arguments: object) -> list:
        """The same call to every engine. One that fails waits for the others: none may run on into an abort."""
        calls = (getattr(receiver, action)(*arguments) for receiver in self.receivers)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _check_tensors(self) -> None:
        """Names, shapes and dtypes of all tensors against each engine's own list, before it is sent the first byte."""
        sent = await self.source.tensors()
        for receiver in self.receivers:
            if receiver.name in self._checked:
                continue
            known = await receiver.inventory()
            for name, form in sent.items():
                if name not in known:
                    raise SlimxError(f"engine {receiver.name} has no tensor {name}; it loads another model")
                if known[name] != form:
                    raise SlimxError(f"engine {receiver.name} holds {name} as {known[name]}, the trainer sends {form}")
            if missing := sorted(known.keys() - sent.keys()):
                raise SlimxError(
                    f"engine {receiver.name} loads {missing[0]}, which the trainer does not have "
                    f"({len(missing)} such tensors)"
                )
            self._checked.add(receiver.name)


class _Stage:
    """Times a stage of a publication and remembers its name for the deadline's error."""

    def __init__(self, publisher: Publisher, out: Publication, name: str):
        self.publisher, self.out, self.name = publisher, out, name

    async def __aenter__(self) -> None:
        self.publisher._stage = self.name
        self.start = time.perf_counter()

    async def __aexit__(self, *_: object) -> None:
        seconds = self.out.seconds
        seconds[self.name] = seconds.get(self.name, 0.0) + time.perf_counter() - self.start
