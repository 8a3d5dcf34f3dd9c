"""One rank's share in filling buckets: ranks of one machine write into memory that they share, others send theirs.

one machine       each engine rank's part of a bucket is in the memory of another trainer rank
several machines  a bucket is in the publisher's memory, which writes it to a file (an export, `disk`)
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import numpy as np
import torch
import torch.distributed as dist

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.pack.packer import Packer, Share
from slimx.reshard.pack.pieces import compact, pieces_of, spread
from slimx.reshard.packed import PUBLISHER
from slimx.reshard.transports.memory import MemoryFile, open_memory


def owned(bucket: int, packer: Packer, holders: int) -> list[int]:
    """The parts of a bucket whose memory is that of the packer's rank, where `holders` ranks take turns.

    Turns go on from bucket to bucket: no rank's memory, nor its link, serves more than its share."""
    return [part for part in range(packer.parts) if (bucket * packer.parts + part) % holders == packer.rank]


class Gatherer:
    """All ranks call `fill` together, in the same order of buckets."""

    def __init__(self, packer: Packer, *, remote: Collection[int], group: dist.ProcessGroup | None, holders: int = 1):
        """`remote`: ranks that cannot open the publisher's memory; they send through `group` (of host memory).
        `holders`: ranks, from the publisher on, whose memory buckets are in; more than it only if none is remote."""
        self.packer, self.remote, self.group, self.holders = packer, sorted(remote), group, holders
        self._files: dict[int, dict[int, MemoryFile]] = {}
        """By bucket and part."""
        self._mapped: dict[str, tuple[int, torch.Tensor]] = {}
        """By path of another rank's file its identity and its memory."""

    def open(self, bucket: int) -> dict[int, str]:
        """By part of `bucket` whose memory is this rank's, its path. Kept until `release(bucket)`."""
        if bucket not in self._files:
            size = self.packer.form(bucket).size
            self._files[bucket] = {part: MemoryFile(size) for part in owned(bucket, self.packer, self.holders)}
        return {part: file.path for part, file in self._files[bucket].items()}

    def fill(self, bucket: int, paths: Sequence[str]) -> Share:
        """Bring this rank's part of `bucket` into the memories at `paths`."""
        rank = self.packer.rank
        if rank in self.remote:
            run, share = self.packer.pack_run(bucket)
            if len(run):
                dist.send(run, PUBLISHER, group=self.group)
            return share
        # Mappings stay, like the files, until their owner has closed them.
        self._mapped = {known: entry for known, entry in self._mapped.items() if _file(known) == entry[0]}
        own, size = self._files.get(bucket, {}), self.packer.form(bucket).size
        memories = [own[part].bytes if part in own else self._map(path, size) for part, path in enumerate(paths)]
        share = self.packer.pack(bucket, *memories)
        if rank == PUBLISHER:
            for other in self.remote:
                self._receive(bucket, other, memories[0])
        return share

    def release(self, bucket: int | None = None) -> None:
        """Give one bucket's memory back; receivers that still map it keep it for themselves.

        None: a publication has ended. Its memory stays for the next one: the first touch of fresh pages costs several
        times what packing into them does.
        """
        if bucket is not None and bucket in self._files:
            for file in self._files.pop(bucket).values():
                file.close()

    def close(self) -> None:
        """Nothing: host memory stays for the next publication."""

    def _map(self, path: str, size: int) -> torch.Tensor:
        """Another rank's memory at `path`."""
        if path not in self._mapped:
            memory = open_memory(path, size)
            self._mapped[path] = _file(path), memory
        return self._mapped[path][1]

    def _receive(self, bucket: int, other: int, memory: torch.Tensor) -> None:
        plan = self.packer.plan
        pieces = pieces_of(plan, plan.moves_of(other, bucket), self.packer.form(bucket), None)
        _, size = compact(pieces)
        if size:
            run = torch.empty(size, dtype=torch.uint8)
            dist.recv(run, other, group=self.group)
            # The sender's share of the checksums covers these bytes: what happens to them here is found by a receiver.
            kernel.pack(spread(pieces, run), memory, np.zeros(1, np.uint64))


def _file(path: str) -> int:
    """The file that is open at `path`, 0 if none: the number of a closed one is given to another."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
