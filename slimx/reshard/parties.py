"""Interfaces between the publisher and the other participants in a publication.

    Source --gather--> Delivery --bring--> Recipient (one per engine; `Members` lists them)

The publisher calls source, delivery, recipients and members. These do not call each other, with one exception: the
delivery moves a bucket to an engine and makes the engine's recipient stage the bucket. A *verb* is a method of
`Receiver`, such as `stage`; a recipient forwards it by name to the process that performs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.packed import PackedBucket

Staging = Literal["model", "bucket"]
"""When engines copy staged weights into the model: "model", once after all buckets are staged; "bucket", each bucket as
it arrives."""


class ReceiverLost(SlimxError):
    """Raised if an engine died or did not respond in time. If an engine responds with an error, another SlimxError is
    raised."""


class NoReceiverLeft(SlimxError):
    """Raised if a publication lost all its engines. The same version can be published to them after they have
    restarted."""


class TransportLost(SlimxError):
    """Raised if the transport failed for a reason other than a failed engine. The same version can be published
    again."""


class Source(Protocol):
    """Owner of the weights to publish, usually the trainer ranks."""

    async def begin(self, manifest: Manifest) -> None:
        """Starts the publication that `manifest` identifies."""

    async def forms(self) -> list[dict[str, str]]:
        """Returns every tensor that will be sent, name -> "dtype:d0,d1".

        The list has one dict that applies to all engine ranks (encodings "hf" and "adapters"), or one per engine rank
        ("local")."""

    async def bucket_count(self) -> int: ...

    async def gather(self, bucket: int) -> PackedBucket:
        """Packs one bucket in the memory of the publishing ranks, where it stays until it is released, and returns its
        description."""

    async def release(self, bucket: int | None = None) -> None:
        """Releases the memory of `bucket`. If `bucket` is None, the publication has ended, and the source may keep its
        memory for the next one."""


class Receiver(Protocol):
    """Steps of a publication that an engine performs, as methods of an object in the process that owns the engine's
    server. If a method raises SlimxError, the engine is dropped from the publication."""

    async def inventory(self, encoding: Encoding) -> list[dict[str, str]]:
        """Returns every tensor that the engine loads in the given encoding, in the format of `Source.forms`."""

    async def transport(self, method: str, *arguments: object) -> object:
        """Calls `method` of the transport's receiver on the engine. May also be called before the publication has begun
        on the engine."""

    async def begin(self, manifest: Manifest, staging: Staging) -> None:
        """Prepares the engine for one publication. From now on the engine refuses calls that belong to earlier
        publications."""

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        """Opens a bucket in the memory where it was packed or delivered, and verifies its checksums; the model does not
        change."""

    async def receive(self, packed: PackedBucket, bucket: int) -> None:
        """Assembles a bucket from bytes that the trainer ranks sent or from the transport's files, and stages it."""

    async def abort(self) -> None:
        """Drops staged buckets, because the publication has failed."""

    async def pause(self) -> None:
        """Pauses generation unless it is already paused."""

    async def load(self) -> None:
        """Copies the staged buckets into the model. From now on the engine is DIRTY: it must not serve until it is
        verified."""

    async def verify(self) -> Json:
        """Verifies the model's weights against the published checksums; returns {"checked": number of tensors verified,
        ...}."""

    async def commit(self, version: int) -> None:
        """Ends the publication on the engine, and sets the version of its weights to `version`."""

    async def resume(self) -> None:
        """Resumes generation, after reallocating the memory that the engine had released."""


PROTOCOL = 9
"""Version of the JSON messages with which an engine forwards verbs (methods of `Receiver`) to its server's ranks
(`slimx/adapters/sglang/plugin.py`). Both sides must agree on it."""
BEFORE_BEGIN = ("inventory", "transport", "begin")
"""Verbs (methods of `Receiver`) that may be called before the engine has begun the publication."""


class Recipient(Protocol):
    """Engine as the publisher sees it; the object stays the same when the engine is restarted."""

    name: str
    incarnation: int
    """Number that increases with every restart. Results of `Receiver` methods performed before a restart are no longer
    valid after it."""

    async def perform(self, verb: str, epoch: int, *arguments: object) -> Any:
        """Makes the engine perform `verb`, a method of `Receiver`, with `arguments`, and returns the result. `epoch`:
        membership epoch in which the publication began.

        Raises ReceiverLost if the engine died or does not respond in time."""


class LocalRecipient:
    """Recipient that performs verbs (methods of `Receiver`) in the publisher's process. A subclass implements each verb
    as a method with the verb's name."""

    incarnation = 1

    async def perform(self, verb: str, epoch: int, *arguments: object) -> object:
        return await getattr(self, verb)(*arguments)


class Delivery:
    """Base class for deliveries, with which transports bring gathered buckets to the engines. The base class itself
    moves nothing: engines open the buckets in the memory of the trainer ranks."""

    keeps = False
    """True if this delivery keeps published weights, so that they can be published again without the trainers
    (`kept`)."""
    wire: int | None = None
    """Bytes sent to all engines in the current or most recent publication; None if they are not counted."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        """Prepares to deliver `buckets` buckets of the publication that `manifest` identifies."""

    async def take(self, packed: PackedBucket, bucket: int) -> PackedBucket:
        """Accepts a bucket that the source has gathered, and returns it as engines will receive it: `packed` itself, or
        a copy, in which case the source may release its memory."""
        return packed

    async def connect(self, recipient: Recipient, epoch: int) -> None:
        """Ensures that `recipient` can receive buckets in the publication that began in the membership epoch
        `epoch`."""

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        """Delivers a bucket to `recipient` and waits until it is staged. A bucket that consists of several files
        (`packed.chain`) is assembled on the engine first."""
        await recipient.perform("receive" if packed.chain else "stage", epoch, packed, bucket)

    async def end(self) -> None:
        """Ends the current publication, after success or failure."""

    def renew(self) -> None:
        """Discards the connections to the source's previous processes (trainer ranks) after new ones have replaced
        them."""

    def kept(self, version: int) -> Source | None:
        """Returns a source for the weights of `version` if this delivery has kept them, else None."""
        return None


class Members(Protocol):
    """Engines of a run. Their membership epoch is a number that increases whenever an engine is lost, restarted or
    admitted."""

    @property
    def epoch(self) -> int: ...

    def candidates(self) -> Sequence[Recipient]:
        """Returns the running engines: those that serve, and restarted ones that wait for published weights."""

    async def quarantine(self, recipient: Recipient, error: SlimxError) -> None:
        """Removes the engine from the router because of `error`, and starts its recovery in the background."""

    async def admit(self, recipient: Recipient) -> None:
        """Adds an engine that has a verified version to the router."""
