"""Fills buckets from one rank: ranks of one machine write into shared memory, others send their contribution.

one machine       each engine rank's part of a bucket is in the memory of a different trainer rank
several machines  a bucket is in the publisher's memory, which writes it to a file (an export, `disk`)
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
    """Returns the parts of a bucket that are in the memory of the packer's rank if `holders` ranks take turns.

    Turns continue from bucket to bucket, so memory and links of all ranks are used equally."""
    return [part for part in range(packer.parts) if (bucket * packer.parts + part) % holders == packer.rank]


class Gatherer:
    """Gathers buckets in host memory. All ranks call `fill` together, in the same order of buckets."""

    def __init__(self, packer: Packer, *, remote: Collection[int], group: dist.ProcessGroup | None, holders: int = 1):
        """Creates a gatherer for the packer's rank.

        `remote`: ranks that cannot open the publisher's memory; they send through `group` (of host memory). `holders`:
        number of ranks, from the publisher on, whose memory holds buckets; more than one only if no rank is remote."""
        self.packer = packer
        self.remote = sorted(remote)
        self.group = group
        self.holders = holders
        self._files: dict[int, dict[int, MemoryFile]] = {}
        """Bucket -> part -> file."""
        self._mapped: dict[str, tuple[int, torch.Tensor]] = {}
        """Path of another rank's file -> its inode and memory."""

    def open(self, bucket: int) -> dict[int, str]:
        """Returns the path of each part of `bucket` that is in this rank's memory. Valid until `release(bucket)`."""
        if bucket not in self._files:
            size = self.packer.form(bucket).size
            parts = local_parts(bucket, self.packer, self.holders)
            self._files[bucket] = {part: MemoryFile(size) for part in parts}
        return {part: file.path for part, file in self._files[bucket].items()}

    def fill(self, bucket: int, paths: Sequence[str]) -> Contribution:
        """Writes this rank's contribution to `bucket` into the memories at `paths`."""
        rank = self.packer.rank
        if rank in self.remote:
            run, contribution = self.packer.pack_run(bucket)
            if len(run):
                dist.send(run, PUBLISHER, group=self.group)
            return contribution
        # Mappings stay, like the files, until their owner has closed them.
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
        """Releases one bucket's memory; receivers that have mapped it keep it for themselves.

        None: a publication has ended. Its memory stays for the next one: the first touch of fresh pages costs several
        times as much as packing into them."""
        if bucket is not None and bucket in self._files:
            for file in self._files.pop(bucket).values():
                file.close()

    def close(self) -> None:
        """Does nothing: host memory stays for the next publication."""

    def _map(self, path: str, size: int) -> torch.Tensor:
        """Returns another rank's memory at `path`."""
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
            # The sender's checksums cover these bytes: receivers detect any change to them here.
            kernel.pack(spread(pieces, run), memory, np.zeros(1, np.uint64))


def _inode(path: str) -> int:
    """Returns the inode that is open at `path`, 0 if none: descriptors of closed files are reused."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
