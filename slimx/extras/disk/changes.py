"""Weight versions that are stored as files of changes (`publish.delta` with `publish.transport: disk`).

A bucket is stored in full in the file of one version, and the next versions store only its changes
(`slimx.extras.direct.ends.frames`). The file with the full bucket and the files of changes after it are the bucket's
*chain*, which is kept as long as the newest version needs it.

    version-000004/bucket-00000.safetensors    whole
    version-000005/bucket-00000.delta          changes since version 4
    version-000006/bucket-00000.delta          changes since version 5

The writer (`ChangesDirectory`) keeps the bytes that it wrote last. The owner process of an engine (`ChainReader`) keeps
the bytes that it read last, and reads the files of the chain that it has not read yet: usually one, or all of them
after a restart. Engines verify the whole tensors afterwards, as for every publication.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from slimx.errors import SlimxError
from slimx.extras.direct.ends import frames
from slimx.extras.disk.versions import ChainFile, VersionDirectory, write_bucket, write_file
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.transports.memory import MemoryFile, open_memory

Chain = tuple[ChainFile, ...]


class ChangesDirectory(VersionDirectory):
    """Directory of published versions, each stored as files with the changes since the previous version."""

    def __init__(self, directory: Path | str, item: int, every_full: int):
        """Opens the directory in which versions are stored. `item`: bytes per element. Every `every_full`-th completed
        version is stored in full."""
        super().__init__(directory)
        self.item = item
        self.every_full = every_full
        self._last: dict[int, torch.Tensor] = {}
        """Content of each bucket as last written, in host memory, by the bucket's index."""
        self._chains: dict[int, Chain] = {}
        """Files of complete versions from which the content in `_last` can be read, by the bucket's index."""
        self._written: dict[int, Chain] = {}
        """Files of the version that is being written, by the bucket's index."""
        self._completed = 0
        """Number of versions completed so far."""
        self._version = -1
        """Number of the last completed version; -1 before the first."""
        self._frame = torch.empty(0, dtype=torch.uint8)

    def begin(self, manifest: Manifest) -> None:
        super().begin(manifest)
        self._written = {}
        # Publishing a version again replaces its files, so changes must not refer to them.
        if self._completed % self.every_full == 0 or manifest.version <= self._version:
            self._chains.clear()

    def add(self, bucket: int, packed: PackedBucket, data: torch.Tensor) -> PackedBucket:
        """Writes the changes in the bucket with index `bucket` since the previous version, and returns the bucket with
        the files to read. `data`: the bucket's bytes, uint8 [size].

        The whole bucket is written if its changes are not smaller, or if no complete version contains the content in
        `_last`, to which the changes would refer."""
        previous = self._chains.pop(bucket, ())  # until this version is complete, no complete version contains `_last`
        last = self._last.get(bucket)
        attempt = self._partial.name
        nbytes = len(data)
        length = nbytes
        if previous and last is not None and len(last) == nbytes:
            if len(self._frame) < frames.room(nbytes):
                self._frame = torch.empty(frames.room(nbytes), dtype=torch.uint8)
            length = frames.encode(last, data, self._frame, item=self.item)
        if length < nbytes:
            path = self._partial / f"bucket-{bucket:05d}.delta"
            write_file(path, memoryview(self._frame[:length].numpy()))
            chain = (*previous, ChainFile(attempt, str(path), 0, length))
        else:
            path = self._partial / f"bucket-{bucket:05d}.safetensors"
            chain = (ChainFile(attempt, str(path), write_bucket(path, packed, data).size - nbytes, nbytes),)
        if last is None or len(last) != nbytes:
            last = torch.empty(nbytes, dtype=torch.uint8)
            self._last[bucket] = last
        last.copy_(data)
        self._written[bucket] = chain
        written = PackedBucket(str(path), nbytes, packed.targets, chain=chain)
        self._buckets[bucket] = written
        return written

    def commit(self) -> None:
        complete = self._path(self.manifest.version)
        self._chains = {}
        for bucket, chain in self._written.items():
            *previous, written = chain
            moved = replace(written, path=str(complete / Path(written.path).name))
            self._chains[bucket] = (*previous, moved)
            self._buckets[bucket] = replace(self._buckets[bucket], path=moved.path, chain=self._chains[bucket])
        self._completed += 1
        self._version = self.manifest.version
        super().commit()

    def _remove_old(self, complete: Path) -> None:
        needed = {complete}
        for chain in self._chains.values():
            needed.update(Path(file.path).parent for file in chain)
        for other in self.directory.glob("version-??????"):
            if other not in needed:
                shutil.rmtree(other)


class ChainReader:
    """Reader of published versions from disk, in the process that owns an engine. It keeps every bucket in memory,
    because later versions contain only changes to it."""

    def __init__(self, item: int):
        self.item = item
        self._buckets: dict[str, tuple[str, torch.Tensor]] = {}
        """For each bucket, by the name of its files without extension: the publication attempt that wrote the file read
        last, and the bucket's content after this file."""
        self.read = 0
        """Number of bytes that have been read from files so far."""

    @contextmanager
    def landed(self, packed: PackedBucket) -> Iterator[PackedBucket]:
        """Yields the whole bucket in memory that a server can map; a server that has mapped it keeps access after the
        block. Raises SlimxError if a file has an unexpected length, naming the file, or if its changes are not valid
        for a bucket of this size."""
        memory = self._updated(packed)
        file = MemoryFile(packed.size)
        try:
            file.bytes.copy_(memory)
            yield PackedBucket(file.path, packed.size, packed.targets)
        finally:
            file.close()

    def _updated(self, packed: PackedBucket) -> torch.Tensor:
        name = Path(packed.path).stem
        attempt, memory = self._buckets.pop(name, ("", None))
        attempts = [file.attempt for file in packed.chain]
        first = attempts.index(attempt) + 1 if attempt in attempts else 0
        if memory is None or len(memory) != packed.size:
            memory = torch.empty(packed.size, dtype=torch.uint8)
            first = 0
        for index, file in enumerate(packed.chain[first:], first):
            data = self._read(file)
            if index:
                frames.apply(data, memory, item=self.item)
            elif len(data) == packed.size:
                memory.copy_(data)
            else:
                raise _invalid(file, f"contains {len(data)} bytes for a bucket of {packed.size} bytes")
        self._buckets[name] = attempts[-1], memory
        return memory

    def _read(self, file: ChainFile) -> torch.Tensor:
        if min(file.start, file.nbytes) < 0:
            raise _invalid(file, f"has a negative size or offset ({file.nbytes} bytes at byte {file.start})")
        data = open_memory(file.path, file.start + file.nbytes, private=True)[file.start :]
        self.read += file.nbytes
        return data


def _invalid(file: ChainFile, problem: str) -> SlimxError:
    return SlimxError(
        f"{file.path} {problem}; set publish.directory to a directory that all machines share and to which only this "
        "run writes",
    )
