"""Transport "disk": trainer rank 0 writes each bucket, or its changes, to a file on a shared file system.

Engines map the file, or their owner processes assemble the bucket from changes. A complete version is kept, so that a
recovering engine can load it while the trainers train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimx.engines.transport import End, Trainers, Transport
from slimx.reshard.packed import PUBLISHER
from slimx.reshard.parties import Delivery, Source

if TYPE_CHECKING:
    from slimx.config.schema import Config
    from slimx.config.sections.publish import Publish
    from slimx.extras.disk.versions import StoredVersion
    from slimx.reshard.manifest import Manifest
    from slimx.reshard.packed import PackedBucket


class DiskTransport(Transport):
    """Transport that publishes weights through files (see `slimx.engines.transport.Transport`)."""

    def end(self, publish: Publish) -> Callable[[], End] | None:
        """Returns a function that creates the receiver, which assembles buckets from changes in a server's owner
        process; None if whole buckets are published."""
        if publish.changes is None:
            return None
        from slimx.extras.disk.file_end import FilesEnd

        return partial(FilesEnd, publish.changes[0])

    def connect(self, config: Config, trainers: Trainers, engines: Any, source: Source) -> tuple[Source, Delivery]:
        directory = config.publish.directory or Path(config.run.dir, "publish")
        return source, DiskDelivery(trainers, Path(directory).absolute())


class DiskDelivery(Delivery):
    """Delivers buckets as files, which trainer rank 0 writes from its memory."""

    keeps = True

    def __init__(self, trainers: Trainers, directory: Path):
        """Sets the `directory` in which versions are stored. `trainers`: trainer ranks, of which rank 0 writes the
        files."""
        self.trainers = trainers
        self.directory = directory
        self._unwritten = -1
        """Number of buckets of the current publication that have not been written yet; -1 before the first publication
        and after a complete one."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        self._unwritten = buckets
        self.wire = 0
        await self._call("begin", "the begin of a version", directory=str(self.directory), manifest=manifest)

    async def take(self, packed: PackedBucket, bucket: int) -> PackedBucket:
        written = await self._call("write", f"the write of bucket {bucket}", bucket=bucket, packed=packed)
        self._unwritten -= 1
        self.wire = (self.wire or 0) + (written.chain[-1].nbytes if written.chain else written.size)
        return written

    async def end(self) -> None:
        if self._unwritten == 0:
            self._unwritten = -1
            await self._call("complete", "the completion of a version")

    def kept(self, version: int) -> StoredVersion | None:
        from slimx.extras.disk.versions import newest

        stored = newest(self.directory)
        return stored if stored is not None and stored.manifest.version == version else None

    async def _call(self, operation: str, name: str, **arguments: object) -> Any:
        (result,) = await self.trainers.call(f"disk.{operation}", name, per_rank=None, ranks=[PUBLISHER], **arguments)
        return result
