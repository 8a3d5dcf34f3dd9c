"""The parties of a publication as the publisher sees them.

    Source --gather--> Delivery --bring--> Recipient (one for each engine, of those that Members names)

The publisher calls all four. Only a delivery calls another party: it moves a bucket and makes the recipient stage it. A
recipient forwards the verbs of `Receiver` by name to the process that performs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.packed import PackedBucket

Staging = Literal["model", "bucket"]
"""When engines copy: once after all buckets are staged, or each bucket as it arrives."""


class ReceiverLost(SlimxError):
    """Raised if an engine died or did not respond in time, rather than refusing."""


class NoReceiverLeft(SlimxError):
    """Raised if a publication lost all its engines. Restarted engines can receive the same version again."""


class TransportLost(SlimxError):
    """Raised if the transport failed and no engine is at fault: the same version can be published again."""


class Source(Protocol):
    """Trainers, or another owner of their weights."""

    async def begin(self, manifest: Manifest) -> None:
        """Begins a publication."""
        ...

    async def forms(self) -> list[dict[str, str]]:
        """Returns every tensor that will be sent, name -> "dtype:d0,d1": one dict for all engine ranks ("hf"), or one
        per engine rank ("local")."""
        ...

    async def bucket_count(self) -> int: ...

    async def gather(self, bucket: int) -> PackedBucket:
        """Gathers one bucket in the publishing rank's memory, where it stays until it is released."""
        ...

    async def release(self, bucket: int | None = None) -> None:
        """Releases one bucket's memory. None: the publication has ended; memory may be kept for the next one."""
        ...


class Receiver(Protocol):
    """Verbs of a publication, which an engine performs in the process that owns its server.

    Each may raise SlimxError to refuse; the engine then leaves the publication."""

    async def inventory(self, encoding: Encoding) -> list[dict[str, str]]:
        """Returns every tensor that the engine loads in this encoding, in the form of `Source.forms`."""
        ...

    async def transport(self, method: str, *arguments: object) -> object:
        """Calls a method of the transport's receiver at the engine, before the publication begins there."""
        ...

    async def begin(self, manifest: Manifest, staging: Staging) -> None:
        """Prepares one publication; verbs of older ones are refused from now on."""
        ...

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        """Opens a bucket in place and verifies its bytes, without changing the model."""
        ...

    async def receive(self, packed: PackedBucket, bucket: int) -> None:
        """Receives a bucket from the trainer ranks or its files, and stages it."""
        ...

    async def abort(self) -> None:
        """Drops staged buckets."""
        ...

    async def pause(self) -> None:
        """Pauses generation, unless it is already paused."""
        ...

    async def load(self) -> None:
        """Copies staged buckets into the model, which is DIRTY from now on."""
        ...

    async def verify(self) -> Json:
        """Verifies the engine's weights: {checked: number of tensors that are as published, ...}."""
        ...

    async def commit(self, version: int) -> None:
        """Ends the publication and sets the version of the weights."""
        ...

    async def resume(self) -> None:
        """Restores released memory and resumes generation."""
        ...


PROTOCOL = 9
"""Version of the verbs' JSON form in which an engine forwards them to its server's ranks
(`slimx/adapters/sglang/plugin.py`)."""
BEFORE_BEGIN = ("inventory", "transport", "begin")
"""Verbs that precede the begin of the publication at an engine."""


class Recipient(Protocol):
    """One engine from the publisher's view, across all its restarts."""

    name: str
    incarnation: int
    """Increases with every restart; requests to an earlier incarnation have to be repeated."""

    async def perform(self, verb: str, epoch: int, *arguments: object) -> Any:
        """Makes the engine perform a verb of `Receiver` in the publication of membership `epoch`.

        Raises ReceiverLost if the engine is gone or does not respond in time."""
        ...


class LocalRecipient:
    """A recipient whose verbs are its methods, without a separate process."""

    incarnation = 1

    async def perform(self, verb: str, epoch: int, *arguments: object) -> object:
        return await getattr(self, verb)(*arguments)


class Delivery:
    """Delivery of gathered buckets to the engines. This one moves nothing: engines open buckets in place."""

    keeps = False
    """True if a published version can be published again without its source (`kept`)."""
    wire: int | None = None
    """Bytes sent to all engines in the current or last publication; None if not counted."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        """Begins a publication of `buckets` buckets."""

    async def take(self, packed: PackedBucket, bucket: int) -> PackedBucket:
        """Accepts a gathered bucket. Returns it as it will be delivered: `packed` itself, or a copy that outlives the
        source's."""
        return packed

    async def connect(self, recipient: Recipient, epoch: int) -> None:
        """Ensures that buckets of the publication of membership `epoch` can reach `recipient`."""

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        """Delivers a bucket to `recipient`, which stages it; a bucket of several files is assembled first."""
        await recipient.perform("receive" if packed.chain else "stage", epoch, packed, bucket)

    async def end(self) -> None:
        """Ends a publication, successful or not."""

    def renew(self) -> None:
        """Resets connections after the source's processes were replaced."""

    def kept(self, version: int) -> Source | None:
        """Returns a source of `version` if this delivery has kept it."""
        return None


class Members(Protocol):
    """Engines of the run. The epoch increases with every change."""

    @property
    def epoch(self) -> int: ...

    def candidates(self) -> Sequence[Recipient]:
        """Returns the running engines: serving ones, and restarted ones without published weights."""
        ...

    async def quarantine(self, recipient: Recipient, error: SlimxError) -> None:
        """Stops routing requests to the engine; it is recovered in the background."""
        ...

    async def admit(self, recipient: Recipient) -> None:
        """Starts routing requests to an engine that holds a verified version."""
        ...
