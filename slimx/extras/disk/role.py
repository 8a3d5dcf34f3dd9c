"""Operations of the trainer rank that writes versions as files (role "disk")."""

from __future__ import annotations

from slimx.extras.disk.changes import ChangesDirectory
from slimx.extras.disk.versions import VersionDirectory
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.transports.memory import open_memory
from slimx.trainer.operation import operation
from slimx.trainer.rank import TrainerRank


class DiskRole:
    """Writes versions on the rank whose memory holds buckets; see `slimx.trainer.rank.Role`."""

    def __init__(self, rank: TrainerRank):
        self._changes = rank.config.publish.changes
        self._directory: VersionDirectory | None = None

    def reload(self, *, training: bool = True) -> None:
        """Does nothing: no part of a version is on the device."""

    def offload(self, *, weights: bool = True) -> None:
        """Does nothing: no part of a version is on the device."""

    @operation()
    def begin(self, *, directory: str, manifest: Manifest) -> None:
        """Begins a version as files in `directory`."""
        if self._directory is None:
            if self._changes is None:
                self._directory = VersionDirectory(directory)
            else:
                self._directory = ChangesDirectory(directory, *self._changes)
        self._directory.begin(manifest)

    @property
    def _begun(self) -> VersionDirectory:
        """The directory of the version that `begin` began."""
        assert self._directory is not None, "begin is called first"
        return self._directory

    @operation("publish")
    def write(self, *, bucket: int, packed: PackedBucket) -> PackedBucket:
        """Writes a bucket of the version. Returns the bucket as stored in its file."""
        return self._begun.add(bucket, packed, open_memory(packed.path, packed.size))

    @operation()
    def complete(self) -> None:
        """Completes the version after all its buckets are written."""
        self._begun.commit()
