"""Fills buckets in GPU memory with the contributions of all trainer ranks, without copies through host memory.

The packing kernel of a rank writes into the memory of another rank's GPU over NVLink or PCIe. Ranks that cannot reach
the publisher's GPU send their contribution through the trainers' process group. Memory for two buckets is allocated, so
that one is packed while engines read the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from slimx.errors import SlimxError
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.pack.gather import local_parts
from slimx.reshard.pack.packer import Contribution, Packer, total
from slimx.reshard.pack.pieces import compact, pieces_of, spread
from slimx.reshard.packed import PUBLISHER
from slimx.reshard.transports.device import DeviceMemory, opened

SLOTS = 2


class DeviceGatherer:
    """Gathers buckets in GPU memory; has the interface of `slimx.reshard.pack.gather.Gatherer`, which uses host memory.
    All trainer ranks call `fill` for the same buckets in the same order."""

    def __init__(self, packer: Packer, *, remote: Collection[int], group: dist.ProcessGroup | None, holders: int = 1):
        """Creates the gatherer for the rank of the packer.

        `remote`: ranks that cannot reach the memory of the publisher's GPU and send their contribution through `group`,
        a process group for GPU memory. `holders`: number of ranks, including the publisher, whose GPU memory contains
        parts of buckets; 1 if there are remote ranks."""
        self.packer = packer
        self.remote = sorted(remote)
        self.group = group
        self.holders = holders
        self._free: list[DeviceMemory] = []
        self._memories: dict[int, dict[int, DeviceMemory]] = {}
        """Bucket -> index of a part -> memory of this rank's GPU that contains the part."""

    def open(self, bucket: int) -> dict[int, str]:
        """Returns {part: path} for the parts of `bucket` in the memory of this rank's GPU, which is allocated if
        necessary.

        The paths are valid until `release(bucket)`. Raises SlimxError if two other buckets are open."""
        if bucket not in self._memories:
            if len(self._memories) == SLOTS:
                raise SlimxError(
                    f"bucket {bucket} cannot be opened while buckets {' and '.join(map(str, sorted(self._memories)))} "
                    "occupy all memory; release one of those buckets first",
                    code="pack.no_memory",
                    about=f"bucket {bucket}",
                )
            parts = local_parts(bucket, self.packer, self.holders)
            self._memories[bucket] = {part: self._take() for part in parts}
            for memory in self._memories[bucket].values():
                memory.clear()  # may contain another bucket's bytes; padding must be zero, and no rank writes it
        return {part: memory.path for part, memory in self._memories[bucket].items()}

    def fill(self, bucket: int, paths: Sequence[str]) -> Contribution:
        """Writes this rank's contribution to `bucket` into the parts at `paths`, one path per part, waits until it is
        written, and returns the contribution's checksums and flags. A remote rank sends its contribution to the
        publisher instead."""
        rank = self.packer.rank
        if rank in self.remote:
            run, contribution = self.packer.pack_device_run(bucket)
            if len(run):
                dist.send(run, PUBLISHER, group=self.group)
            return contribution
        contributions = []
        for part, path in enumerate(paths):
            with opened(path, self.packer.form(bucket).size, self.packer.device) as address:
                contributions.append(self.packer.pack_at(bucket, part, address))
        if rank == PUBLISHER:
            for other in self.remote:
                self._receive(bucket, other)
        return total(contributions)

    def release(self, bucket: int | None = None) -> None:
        """Makes the memory of `bucket`, or of all buckets if it is None, available to other buckets.

        The caller guarantees that no engine of the publication still reads the bucket. An engine that was dropped from
        the publication may still read it; the bytes that it reads then fail verification."""
        released = list(self._memories) if bucket is None else [bucket]
        for index in released:
            if index in self._memories:
                self._free.extend(self._memories.pop(index).values())

    def close(self) -> None:
        """Frees all GPU memory of the gatherer; the next publication allocates it again. Must not be called during a
        publication."""
        self.release()
        while self._free:
            self._free.pop().close()

    def _take(self) -> DeviceMemory:
        """Returns GPU memory that is large enough for any part of any bucket: previously released memory if there is
        some, else newly allocated memory."""
        if self._free:
            return self._free.pop()
        size = max(self.packer.form(bucket).size for bucket in range(self.packer.plan.count))
        return DeviceMemory(size, self.packer.device)

    def _receive(self, bucket: int, other: int) -> None:
        plan = self.packer.plan
        form = self.packer.form(bucket)
        pieces = pieces_of(plan, plan.moves_of(other, bucket), form, None)
        _, size = compact(pieces)
        if not size:
            return
        device = self.packer.device
        run = torch.empty(size, dtype=torch.uint8, device=device)
        dist.recv(run, other, group=self.group)
        names = [f"the contribution of trainer rank {other}"]
        copies = DevicePlan(spread(pieces, run), bucket_bytes=form.size, names=names, bucket=str(bucket), device=device)
        # These sums are discarded: the sender's checksums cover the bytes, so engines would detect a corrupted copy.
        sums = torch.zeros(1, dtype=torch.int64, device=device)
        flags = torch.zeros(1, dtype=torch.int32, device=device)
        kernel_cuda.pack_at(copies, self._memories[bucket][0].address, sums, flags)
        kernel_cuda.results(copies, sums)
