"""Fills buckets in host memory with the contributions of all trainer ranks.

one machine       every rank writes into shared memory; each engine rank's part of a bucket is in the memory of a
                  different trainer rank
several machines  the bucket is in the memory of trainer rank 0 (the publisher), which writes it to a file (export,
                  transport `disk`); ranks on other machines send it their contributions
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import numpy as np
import torch
import torch.distributed as dist

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.pack.packer import Contribution, Packer
from slimx.reshard.pack.pieces import compact, pieces_of, spread
from slimx.reshard.packed import PUBLISHER
from slimx.reshard.transports.memory import MemoryFile, open_memory


def local_parts(bucket: int, packer: Packer, holders: int) -> list[int]:
    """Returns the indices of the parts of `bucket` that are in the memory of the packer's rank.

    Parts are assigned round-robin to ranks 0 to `holders` - 1, continuing from bucket to bucket, so that memory and
    links of all these ranks are used equally."""
    return [part for part in range(packer.parts) if (bucket * packer.parts + part) % holders == packer.rank]


class Gatherer:
    """Gathers buckets in host memory. All trainer ranks call `fill` for the same buckets in the same order."""

    def __init__(self, packer: Packer, *, remote: Collection[int], group: dist.ProcessGroup | None, holders: int = 1):
        """Creates the gatherer of the packer's rank.

        `remote`: ranks that cannot open the publisher's memory, and instead send their contributions through `group`, a
        process group for host memory (gloo). `holders`: number of ranks, including the publisher, whose memory contains
        parts of buckets; 1 if there are remote ranks."""
        self.packer = packer
        self.remote = sorted(remote)
        self.group = group
        self.holders = holders
        self._files: dict[int, dict[int, MemoryFile]] = {}
        """Bucket -> index of a part -> shared memory of this rank that contains the part."""
        self._mapped: dict[str, tuple[int, torch.Tensor]] = {}
        """Path of another rank's shared memory -> its inode, and its mapping in this process."""

    def open(self, bucket: int) -> dict[int, str]:
        """Returns {part: path} for the parts of `bucket` in this rank's memory, which is allocated if necessary. The
        paths are valid until `release(bucket)`."""
        if bucket not in self._files:
            size = self.packer.form(bucket).size
            parts = local_parts(bucket, self.packer, self.holders)
            self._files[bucket] = {part: MemoryFile(size) for part in parts}
        return {part: file.path for part, file in self._files[bucket].items()}

    def fill(self, bucket: int, paths: Sequence[str]) -> Contribution:
        """Writes this rank's contribution to `bucket` into the parts at `paths`, one path per part, and returns the
        contribution's checksums and flags.

        A remote rank sends its contribution to the publisher, which writes it into the bucket."""
        rank = self.packer.rank
        if rank in self.remote:
            run, contribution = self.packer.pack_run(bucket)
            if len(run):
                dist.send(run, PUBLISHER, group=self.group)
            return contribution
        # A mapping is kept until the owner has closed its file.
        self._mapped = {path: entry for path, entry in self._mapped.items() if _inode(path) == entry[0]}
        files = self._files.get(bucket, {})
        size = self.packer.form(bucket).size
        memories = []
        for part, path in enumerate(paths):
            memories.append(files[part].bytes if part in files else self._map(path, size))
        contribution = self.packer.pack(bucket, *memories)
        if rank == PUBLISHER:
            for other in self.remote:
                self._receive(bucket, other, memories[0])
        return contribution

    def release(self, bucket: int | None = None) -> None:
        """Releases the memory of `bucket`; processes that have mapped it keep their mapping.

        If `bucket` is None, a publication has ended. Memory that is still allocated is then kept for the next
        publication, because the page faults of newly allocated memory would take several times as long as packing."""
        if bucket is not None and bucket in self._files:
            for file in self._files.pop(bucket).values():
                file.close()

    def close(self) -> None:
        """Does nothing, because host memory is kept for the next publication."""

    def _map(self, path: str, size: int) -> torch.Tensor:
        """Returns another rank's shared memory at `path` as uint8 [size]; maps it on first use."""
        if path not in self._mapped:
            memory = open_memory(path, size)
            self._mapped[path] = _inode(path), memory
        return self._mapped[path][1]

    def _receive(self, bucket: int, other: int, memory: torch.Tensor) -> None:
        plan = self.packer.plan
        pieces = pieces_of(plan, plan.moves_of(other, bucket), self.packer.form(bucket), None)
        _, size = compact(pieces)
        if size:
            run = torch.empty(size, dtype=torch.uint8)
            dist.recv(run, other, group=self.group)
            # Not summed again: the sender's checksums cover these bytes, so engines would detect a corrupted copy.
            kernel.pack(spread(pieces, run), memory, np.zeros(1, np.uint64))


def _inode(path: str) -> int:
    """Returns the inode of the file at `path`, or 0 if there is none.

    A changed inode reveals that a path in /proc now refers to another file, because the numbers of closed descriptors
    are reused."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
