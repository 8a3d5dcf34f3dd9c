"""Ways of packed buckets from the trainers to the engines: `publish.transport`.

memory    engines map the memory of the trainer ranks: one machine
cuda_ipc  engines copy from the memory of the trainer ranks' GPUs: one machine
nixl      every trainer rank writes to a process beside each engine: `slimx.engines.delivery.direct`
disk      trainer rank 0 writes each bucket, or what has changed in it, to a file: a shared file system. Engines map it,
          or have it put together beside them. A complete version stays there, and an engine that comes back catches up
          from it while the trainers train
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slimx.cluster.waiting import has_died
from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Delivery, Recipient, TransportLost
from slimx.reshard.transports.disk import StoredVersion, newest


class Owners(Protocol):
    """The trainer ranks, in whose memory buckets are."""

    actors: list[Any]
    """Those of the present ranks."""

    async def begin_version(self, directory: Path, manifest: Manifest) -> None: ...

    async def write_version(self, bucket: int, packed: PackedBucket) -> PackedBucket: ...

    async def complete_version(self) -> None: ...


class MemoryDelivery(Delivery):
    """Buckets that engines open in the memory of trainer ranks."""

    def __init__(self, owners: Owners):
        self.owners = owners
        self._owners: Sequence[Any] = ()
        """The actors that pack the present publication."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        self._owners = list(self.owners.actors)

    async def bring(self, recipient: Recipient, epoch: int, packed: PackedBucket, bucket: int) -> None:
        try:
            await super().bring(recipient, epoch, packed, bucket)
        except SlimxError as error:
            # No engine is to blame for a bucket whose owner has died.
            if self._owners and await has_died(*self._owners):
                raise TransportLost(
                    f"a trainer rank died before a bucket was taken: {error}", code="publish.source", about="trainers"
                ) from error
            raise


class DiskDelivery(Delivery):
    """Buckets that trainer rank 0, which has them in its memory, writes as files."""

    keeps = True

    def __init__(self, owners: Owners, directory: Path):
        """`directory`: of the versions."""
        self.owners, self.directory = owners, directory
        self._unwritten = -1
        """Buckets of the present publication that are not on disk yet."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        self._unwritten, self.wire = buckets, 0
        await self.owners.begin_version(self.directory, manifest)

    async def take(self, packed: PackedBucket, bucket: int) -> PackedBucket:
        written = await self.owners.write_version(bucket, packed)
        self._unwritten -= 1
        self.wire = (self.wire or 0) + (written.chain[-1].nbytes if written.chain else written.size)
        return written

    async def end(self) -> None:
        if self._unwritten == 0:
            self._unwritten = -1
            await self.owners.complete_version()

    def kept(self, version: int) -> StoredVersion | None:
        stored = newest(self.directory)
        return stored if stored is not None and stored.manifest.version == version else None


def make_delivery(owners: Owners, config: Config) -> Delivery:
    """The delivery of buckets that the trainer ranks gather in their memory, by `publish.transport`."""
    options = config.publish
    if options.transport == "disk":
        return DiskDelivery(owners, Path(options.directory or Path(config.run.dir, "publish")).absolute())
    # Buckets of memory and cuda_ipc differ, what is done with them does not. A run of nixl that comes here publishes to
    # no engine.
    return MemoryDelivery(owners)
