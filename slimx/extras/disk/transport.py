"""Transport "disk": trainer rank 0 writes each bucket, or what has changed in it, to a file on a shared file system.

Engines map it, or the process that owns one puts it together. A complete version stays there, and an engine that comes
back catches up from it while the trainers train.
"""

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
    from slimx.extras.disk.shelf import StoredVersion
    from slimx.reshard.manifest import Manifest
    from slimx.reshard.packed import PackedBucket


class DiskTransport(Transport):
    """Files that trainers write and engines read; see `slimx.engines.transport.Transport`."""

    def end(self, publish: Publish) -> Callable[[], End] | None:
        """With changes the process that owns a server makes whole buckets of them."""
        if publish.changes is None:
            return None
        from slimx.extras.disk.end import FilesEnd

        return partial(FilesEnd, publish.changes[0])

    def connect(self, config: Config, trainers: Trainers, engines: Any, source: Source) -> tuple[Source, Delivery]:
        directory = config.publish.directory or Path(config.run.dir, "publish")
        return source, DiskDelivery(trainers, Path(directory).absolute())


class DiskDelivery(Delivery):
    """Buckets that trainer rank 0, which has them in its memory, writes as files."""

    keeps = True

    def __init__(self, trainers: Trainers, directory: Path):
        """`directory`: of the versions."""
        self.trainers, self.directory = trainers, directory
        self._unwritten = -1
        """Buckets of the present publication that are not on disk yet."""

    async def begin(self, manifest: Manifest, buckets: int) -> None:
        self._unwritten, self.wire = buckets, 0
        await self._call("begin", "the begin of a version", directory=str(self.directory), manifest=manifest)

    async def take(self, packed: PackedBucket, bucket: int) -> PackedBucket:
        written = await self._call("write", f"the writing of bucket {bucket}", bucket=bucket, packed=packed)
        self._unwritten -= 1
        self.wire = (self.wire or 0) + (written.chain[-1].nbytes if written.chain else written.size)
        return written

    async def end(self) -> None:
        if self._unwritten == 0:
            self._unwritten = -1
            await self._call("complete", "the end of a version")

    def kept(self, version: int) -> StoredVersion | None:
        from slimx.extras.disk.shelf import newest

        stored = newest(self.directory)
        return stored if stored is not None and stored.manifest.version == version else None

    async def _call(self, operation: str, what: str, **arguments: Any) -> Any:
        (result,) = await self.trainers.call(f"disk.{operation}", what, ranks=[PUBLISHER], **arguments)
        return result
