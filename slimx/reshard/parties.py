"""Who takes part in a publication, as the publisher sees them: the trainers, the engines, and who decides which engines
there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from slimx.errors import SlimxError
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.packed import PackedBucket

Staging = Literal["model", "bucket"]
"""When engines copy: once, when all buckets are staged, or each bucket as it comes."""


class ReceiverLost(SlimxError):
    """An engine died or did not answer in time, as opposed to one that answered with a refusal."""


class NoReceiverLeft(SlimxError):
    """A publication lost all its engines. Those that are restarted can get the same version again."""


class TransportLost(SlimxError):
    """What carries buckets to all engines died. It is started again: the same version can be published again."""


class Source(Protocol):
    """The trainers, or whoever has their weights."""

    async def begin(self, manifest: Manifest) -> None:
        """A publication begins."""
        ...

    async def forms(self) -> list[dict[str, str]]:
        """Every tensor that will be sent, name -> "dtype:d0,d1": one dict that all engine ranks take ("hf"), or one for
        each engine rank ("local")."""
        ...

    async def bucket_count(self) -> int: ...

    async def gather(self, bucket: int) -> PackedBucket:
        """Bring one bucket into the publishing rank's memory. It stays there until it is released."""
        ...

    async def release(self, bucket: int | None = None) -> None:
        """Give one bucket's memory back. None: the publication has ended; memory may stay for the next one."""
        ...


class Receiver(Protocol):
    """One engine. Every call may raise SlimxError, or ReceiverLost if the engine is gone."""

    name: str
    incarnation: int
    """Rises with every restart: what was asked of an earlier one has to be asked again."""

    async def inventory(self, encoding: Encoding) -> list[dict[str, str]]:
        """Every tensor that the engine takes in this encoding, in the form of `Source.forms`."""
        ...

    async def begin(self, manifest: Manifest, staging: Staging) -> None:
        """Get ready for one publication; from now on calls that belong to an older one are refused."""
        ...

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        """Receive a bucket and prove its bytes. Nothing of the model changes."""
        ...

    async def abort(self) -> None:
        """Drop what is staged."""
        ...

    async def pause(self) -> None: ...

    async def load(self) -> None:
        """Copy what is staged in place. DIRTY from here on."""
        ...

    async def verify(self) -> int:
        """Number of tensors that the engine proved to hold as published."""
        ...

    async def commit(self, version: int) -> None: ...

    async def resume(self) -> None: ...


class Members(Protocol):
    """Which engines there are. The epoch rises with every change."""

    @property
    def epoch(self) -> int: ...

    def candidates(self) -> Sequence[Receiver]:
        """Engines that run: those that serve, and restarted ones that hold no published weights yet."""
        ...

    async def quarantine(self, receiver: Receiver, error: SlimxError) -> None:
        """Let no request reach the engine any more; its recovery goes on in the background."""
        ...

    async def admit(self, receiver: Receiver) -> None:
        """The engine holds a verified version and may serve."""
        ...
