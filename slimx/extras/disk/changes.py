"""Versions as files of changes (`publish.delta` with `publish.transport: disk`).

A bucket is whole in one file, and later versions have what has changed in it (`slimx.extras.direct.ends.frames`): its
*chain*, of which every file is kept as long as the newest version needs it.

    version-000004/bucket-00000.safetensors    whole
    version-000005/bucket-00000.delta          changes to the bytes of version 4
    version-000006/bucket-00000.delta          changes to those of version 5

The writer (`ChangesShelf`) keeps the bytes that it wrote last. The process beside an engine (`ChainReader`) keeps
those that it read last, and reads whatever files of the chain lie behind them: one, or after a restart all of them. The
whole tensors are proven afterwards, as ever.
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
from slimx.extras.disk.shelf import ChainFile, Shelf, write_bucket, write_file
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.transports.memory import MemoryFile, open_memory

Chain = tuple[ChainFile, ...]


class ChangesShelf(Shelf):
    """The versions in one directory, each a few files of changes to the one before."""

    def __init__(self, directory: Path | str, item: int, every_full: int):
        """`item`: bytes of an element. Every `every_full`-th version that is complete is whole."""
        super().__init__(directory)
        self.item, self.every_full = item, every_full
        self._kept: dict[int, torch.Tensor] = {}
        """By bucket the bytes written last, in host memory."""
        self._chains: dict[int, Chain] = {}
        """By bucket the files, of complete versions, of the bytes in `_kept`."""
        self._written: dict[int, Chain] = {}
        """The same for the version that is being written."""
        self._complete, self._version = 0, -1
        """Versions completed, and the number of the last one."""
        self._frame = torch.empty(0, dtype=torch.uint8)

    def begin(self, manifest: Manifest) -> None:
        super().begin(manifest)
        self._written = {}
        # A version that is published again takes the place of its own files: nothing can be built upon them.
        if self._complete % self.every_full == 0 or manifest.version <= self._version:
            self._chains.clear()

    def add(self, bucket: int, packed: PackedBucket, data: torch.Tensor) -> PackedBucket:
        """Write what has changed in a bucket whose bytes are `data`, uint8 [size], or all of it where that is not more,
        or no complete version has the bytes that are kept."""
        before = self._chains.pop(bucket, ())  # until this version is complete, what is kept belongs to none
        kept, attempt, nbytes = self._kept.get(bucket), self._partial.name, len(data)
        length = nbytes
        if before and len(kept) == nbytes:
            if len(self._frame) < frames.room(nbytes):
                self._frame = torch.empty(frames.room(nbytes), dtype=torch.uint8)
            length = frames.encode(kept, data, self._frame, item=self.item)
        if length < nbytes:
            path = self._partial / f"bucket-{bucket:05d}.delta"
            write_file(path, memoryview(self._frame[:length].numpy()))
            chain = (*before, ChainFile(attempt, str(path), 0, length))
        else:
            path = self._partial / f"bucket-{bucket:05d}.safetensors"
            chain = (ChainFile(attempt, str(path), write_bucket(path, packed, data).size - nbytes, nbytes),)
        if kept is None or len(kept) != nbytes:
            kept = self._kept[bucket] = torch.empty(nbytes, dtype=torch.uint8)
        kept.copy_(data)
        self._written[bucket] = chain
        self._buckets[bucket] = out = PackedBucket(str(path), nbytes, packed.targets, chain=chain)
        return out

    def commit(self) -> None:
        complete = self._place(self.manifest.version)
        self._chains = {
            bucket: (*chain[:-1], replace(chain[-1], path=str(complete / Path(chain[-1].path).name)))
            for bucket, chain in self._written.items()
        }
        self._buckets = {
            bucket: replace(packed, path=self._chains[bucket][-1].path, chain=self._chains[bucket])
            for bucket, packed in self._buckets.items()
        }
        self._complete, self._version = self._complete + 1, self.manifest.version
        super().commit()

    def _remove_old(self, complete: Path) -> None:
        needed = {complete, *(Path(file.path).parent for chain in self._chains.values() for file in chain)}
        for other in self.directory.glob("version-??????"):
            if other not in needed:
                shutil.rmtree(other)


class ChainReader:
    """The buckets that the process beside an engine has read, and holds."""

    def __init__(self, item: int):
        self.item = item
        self._held: dict[str, tuple[str, torch.Tensor]] = {}
        """By name of the bucket's files the attempt of the last one that was read, and the whole bytes."""
        self.read = 0
        """Bytes of files that were read so far."""

    @contextmanager
    def landed(self, packed: PackedBucket) -> Iterator[PackedBucket]:
        """The whole bucket in memory that a server can open, for the time of the block: whoever has opened it keeps it.

        Raises SlimxError naming a file that is not as long as it should be, or holds no changes of these bytes.
        """
        memory = self._taken(packed)
        file = MemoryFile(packed.size)
        try:
            file.bytes.copy_(memory)
            yield PackedBucket(file.path, packed.size, packed.targets)
        finally:
            file.close()

    def _taken(self, packed: PackedBucket) -> torch.Tensor:
        name = Path(packed.path).stem
        attempt, memory = self._held.pop(name, ("", None))
        attempts = [file.attempt for file in packed.chain]
        first = attempts.index(attempt) + 1 if attempt in attempts else 0
        if memory is None or len(memory) != packed.size:
            memory, first = torch.empty(packed.size, dtype=torch.uint8), 0
        for number, file in enumerate(packed.chain[first:], first):
            data = self._read(file)
            if number:
                frames.apply(data, memory, item=self.item)
            elif len(data) == packed.size:
                memory.copy_(data)
            else:
                raise _odd(file, f"holds {len(data)} bytes of a bucket of {packed.size}")
        self._held[name] = attempts[-1], memory
        return memory

    def _read(self, file: ChainFile) -> torch.Tensor:
        if min(file.start, file.nbytes) < 0:
            raise _odd(file, f"is said to have {file.nbytes} bytes behind {file.start}")
        data = open_memory(file.path, file.start + file.nbytes, private=True)[file.start :]
        self.read += file.nbytes
        return data


def _odd(file: ChainFile, why: str) -> SlimxError:
    return SlimxError(
        f"{file.path} {why}; publish.directory must be one file system on all machines, and nothing but this run may "
        "write into it",
    )
