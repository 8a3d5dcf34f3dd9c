"""Operations of the trainer rank that writes versions as files (role "disk")."""

from __future__ import annotations

from slimx.extras.disk.changes import ChangesShelf
from slimx.extras.disk.shelf import Shelf
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.transports.memory import open_memory
from slimx.trainer.operation import operation
from slimx.trainer.rank import TrainerRank


class DiskRole:
    """The versions of the rank in whose memory buckets are; see `slimx.trainer.rank.Role`."""

    def __init__(self, rank: TrainerRank):
        self._changes = rank.config.publish.changes
        self._shelf: Shelf | None = None

    def reload(self, *, training: bool = True) -> None:
        """Nothing of a version is on the device."""

    def offload(self, *, weights: bool = True) -> None:
        """Nothing of a version is on the device."""

    @operation()
    def begin(self, *, directory: str, manifest: Manifest) -> None:
        """Begin a version as files in `directory`."""
        if self._shelf is None:
            self._shelf = Shelf(directory) if self._changes is None else ChangesShelf(directory, *self._changes)
        self._shelf.begin(manifest)

    @operation("publish")
    def write(self, *, bucket: int, packed: PackedBucket) -> PackedBucket:
        """Write a bucket of the version; the same bucket as it lies in its file."""
        return self._shelf.add(bucket, packed, open_memory(packed.path, packed.size))

    @operation()
    def complete(self) -> None:
        """Make the version complete: all its buckets are written."""
        self._shelf.commit()
