"""The parties of a publication as the publisher sees them.

    Source --gather--> Delivery --bring--> Recipient (one for each engine, of those that Members names)

The publisher calls all four. Of them only a delivery calls another one: it moves a bucket and has the recipient take
it. A recipient forwards the verbs of `Receiver` by their names to the process that does them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

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
    """Raised where the way of the weights failed and no engine is to blame: the same version can be published again."""


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
    """The verbs of a publication, which an engine does in the process that owns its server.

    Each may raise SlimxError: a refusal, after which the engine takes no part in the publication.
    """

    async def inventory(self, encoding: Encoding) -> list[dict[str, str]]:
        """Every tensor that the engine takes in this encoding, in the form of `Source.forms`."""
        ...

    async def transport(self, method: str, *arguments: Any) -> Any:
        """Call a method of the transport's end at the engine, before the publication begins there."""
        ...

    async def begin(self, manifest: Manifest, staging: Staging) -> None:
        """Get ready for one publication; from now on verbs of an older one are refused."""
        ...

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        """Open a bucket where it is and prove its bytes. Nothing of the model changes."""
        ...

    async def receive(self, packed: PackedBucket, bucket: int) -> None:
        """Take a bucket from the trainer ranks, or from its files, and stage it."""
        ...

    async def abort(self) -> None:
        """Drop what is staged."""
        ...

    async def pause(self) -> None:
        """Stop generating, unless the engine has stopped already."""
        ...

    async def load(self) -> None:
        """Copy what is staged in place. DIRTY from here on."""
        ...

    async def verify(self) -> dict[str, Any]:
        """Prove what the engine holds: {checked: number of tensors held as published, ...}."""
        ...

    async def commit(self, version: int) -> None:
        """Close the publication and stamp the weights with their version."""
        ...

    async def resume(self) -> None:
        """Take back memory that is still released, and generate."""
        ...


PROTOCOL = 9
"""Version of the verbs as JSON, in which an engine passes them on to the ranks of its server
(`slimx/adapters/sglang/plugin.py`)."""
BEFORE_BEGIN = ("inventory", "transport", "begin")
"""Verbs that come before the publication has begun at an engine."""


class Recipient(Protocol):
    """One engine as the publisher reaches it, through all its restarts."""

    name: str
    incarnation: int
    """Rises with every restart: what was asked of an earlier one has to be asked again."""

    async def perform(self, verb: str, epoch: int, *arguments: Any) -> Any:
        """Have the engine do a verb of `Receiver` in the publication of membership `epoch`.

        Raises ReceiverLost if the engine is gone or does not answer in time.
        """
        ...


class LocalRecipient:
    """A recipient whose verbs are its own methods, with no process in between."""

    incarnation = 1

    async def perform(self, verb: str, epoch: int, *arguments: Any) -> Any:
        return await getattr(self, verb)(*arguments)


class Delivery:
    """The way of gathered buckets to the engines. This one brings nothing anywhere: engines open buckets in place."""

    keeps = False
    """True where a published version can be published again without its source (`kept`)."""
    wire: int | None = None
    """Bytes that were put on their way to all engines in the publication under way, or the last one; None: they are not
    counted."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        """A publication of so many buckets begins."""

    async def take(self, packed: PackedBucket, bucket: int) -> PackedBucket:
        """Accept a gathered bucket. Returns it as it will be brought: `packed` itself, or a copy that lasts without the
        source."""
        return packed

    async def connect(self, recipient: Recipient, epoch: int) -> None:
        """Make sure that buckets of the publication of membership `epoch` can reach `recipient`."""

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        """Bring a bucket to `recipient` and have it staged there; one in several files is put together first."""
        await recipient.perform("receive" if packed.chain else "stage", epoch, packed, bucket)

    async def end(self) -> None:
        """The publication has ended, whatever became of it at the engines."""

    def renew(self) -> None:
        """The source's processes are others from now on."""

    def kept(self, version: int) -> Source | None:
        """The source of `version` that this delivery keeps."""
        return None


class Members(Protocol):
    """The engines of the run. The epoch rises with every change."""

    @property
    def epoch(self) -> int: ...

    def candidates(self) -> Sequence[Recipient]:
        """Engines that run: those that serve, and restarted ones that hold no published weights yet."""
        ...

    async def quarantine(self, recipient: Recipient, error: SlimxError) -> None:
        """Let no request reach the engine any more; its recovery goes on in the background."""
        ...

    async def admit(self, recipient: Recipient) -> None:
        """The engine holds a verified version and may serve."""
        ...
