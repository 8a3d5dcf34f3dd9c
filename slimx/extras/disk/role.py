"""Operations of the trainer rank that writes versions as files (role "disk" of `slimx.roles`)."""

from __future__ import annotations

from slimx.extras.disk.changes import ChangesDirectory
from slimx.extras.disk.versions import VersionDirectory
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.transports.memory import open_memory
from slimx.trainer.operation import operation
from slimx.trainer.rank import TrainerRank


class DiskRole:
    """Role that writes versions as files, on the rank whose memory contains the buckets (see
    `slimx.trainer.rank.Role`)."""

    def __init__(self, rank: TrainerRank):
        self._changes = rank.config.publish.changes
        self._directory: VersionDirectory | None = None

    def reload(self, *, training: bool = True) -> None:
        """Does nothing, because no part of a version is on the GPU."""

    def offload(self, *, weights: bool = True) -> None:
        """Does nothing, because no part of a version is on the GPU."""

    @operation()
    def begin(self, *, directory: str, manifest: Manifest) -> None:
        """Starts writing a version as files in `directory`. `manifest`: description of the version."""
        if self._directory is None:
            if self._changes is None:
                self._directory = VersionDirectory(directory)
            else:
                self._directory = ChangesDirectory(directory, *self._changes)
        self._directory.begin(manifest)

    @property
    def _begun(self) -> VersionDirectory:
        """Directory of the version that is being written."""
        assert self._directory is not None, "begin is called first"
        return self._directory

    @operation("publish")
    def write(self, *, bucket: int, packed: PackedBucket) -> PackedBucket:
        """Writes the bucket with index `bucket`, and returns it with the path of its file."""
        return self._begun.add(bucket, packed, open_memory(packed.path, packed.size))

    @operation()
    def complete(self) -> None:
        """Marks the version as complete after all its buckets have been written."""
        self._begun.commit()
