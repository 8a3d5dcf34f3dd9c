"""One rank's share in filling buckets: ranks on the publisher's machine write into its memory, others send theirs."""

from __future__ import annotations

import os
from collections.abc import Collection

import numpy as np
import torch
import torch.distributed as dist

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.pack.packer import Packer, Share
from slimx.reshard.pack.pieces import compact, pieces_of, spread
from slimx.reshard.transports.memory import MemoryFile, open_memory

PUBLISHER = 0
"""The rank whose memory the buckets are in."""


class Gatherer:
    """All ranks call `fill` together, in the same order of buckets."""

    def __init__(self, packer: Packer, *, remote: Collection[int], group: dist.ProcessGroup | None):
        """`remote`: ranks that cannot open the publisher's memory; they send through `group` (of host memory)."""
        self.packer, self.remote, self.group = packer, sorted(remote), group
        self._files: dict[int, MemoryFile] = {}
        self._mapped: dict[str, tuple[int, torch.Tensor]] = {}
        """On the publisher's machine: by path the file's identity and its memory."""

    def open(self, bucket: int) -> str:
        """Publisher only: memory for `bucket`; its path. Kept until `release(bucket)`."""
        if bucket not in self._files:
            self._files[bucket] = MemoryFile(self.packer.form(bucket).size)
        return self._files[bucket].path

    def fill(self, bucket: int, path: str) -> Share:
        """Bring this rank's part of `bucket` into the memory at `path`."""
        rank = self.packer.rank
        if rank in self.remote:
            run, share = self.packer.pack_run(bucket)
            if len(run):
                dist.send(run, PUBLISHER, group=self.group)
            return share
        if rank != PUBLISHER:
            return self.packer.pack(bucket, self._map(path, self.packer.form(bucket).size))
        memory = self._files[bucket].bytes
        share = self.packer.pack(bucket, memory)
        for other in self.remote:
            self._receive(bucket, other, memory)
        return share

    def release(self, bucket: int | None = None) -> None:
        """Give one bucket's memory back; receivers that still map it keep it for themselves.

        None: a publication has ended. Its memory stays for the next one: the first touch of fresh pages costs several
        times what packing into them does.
        """
        if bucket is not None and bucket in self._files:
            self._files.pop(bucket).close()

    def close(self) -> None:
        """Nothing: host memory stays for the next publication."""

    def _map(self, path: str, size: int) -> torch.Tensor:
        """The publisher's memory at `path`. Mappings stay, like the files, until the publisher has closed them."""
        self._mapped = {known: entry for known, entry in self._mapped.items() if _file(known) == entry[0]}
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
