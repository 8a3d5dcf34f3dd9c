"""One rank's share in filling buckets in the memory of GPUs: no byte crosses host memory.

Ranks write into each other's memory by their own kernel, over NVLink or PCIe; those that do not reach the publisher's
GPU send theirs through their process group. There are two buckets: one is packed while the other is read by engines.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from slimx.errors import SlimxError
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.pack.gather import owned
from slimx.reshard.pack.packer import Packer, Share, total
from slimx.reshard.pack.pieces import compact, pieces_of, spread
from slimx.reshard.packed import PUBLISHER
from slimx.reshard.transports.device import DeviceMemory, opened

SLOTS = 2


class DeviceGatherer:
    """Gathers buckets in GPU memory, as `slimx.reshard.pack.gather.Gatherer` does in host memory. All ranks call `fill`
    together, in the same order."""

    def __init__(self, packer: Packer, *, remote: Collection[int], group: dist.ProcessGroup | None, holders: int = 1):
        """`remote`: ranks that cannot reach the memory of the publisher's GPU; they send through `group` (of the
        trainers' GPUs). `holders`: as for `slimx.reshard.pack.gather.Gatherer`."""
        self.packer, self.remote, self.group, self.holders = packer, sorted(remote), group, holders
        self._free: list[DeviceMemory] = []
        self._held: dict[int, dict[int, DeviceMemory]] = {}
        """By bucket and part."""

    def open(self, bucket: int) -> dict[int, str]:
        """By part of `bucket` whose memory is that of this rank's GPU, its path. Kept until `release(bucket)`."""
        if bucket not in self._held:
            if len(self._held) == SLOTS:
                held = " and ".join(map(str, sorted(self._held)))
                raise SlimxError(
                    f"bucket {bucket} has no memory: buckets {held} are in it; release one of them first",
                    code="pack.no_memory",
                    about=f"bucket {bucket}",
                )
            self._held[bucket] = {part: self._take() for part in owned(bucket, self.packer, self.holders)}
            for memory in self._held[bucket].values():
                memory.clear()  # of another bucket's bytes: padding is zero, and no rank writes it
        return {part: memory.path for part, memory in self._held[bucket].items()}

    def fill(self, bucket: int, paths: Sequence[str]) -> Share:
        """Bring this rank's part of `bucket` into the memories at `paths`; returns when it is there."""
        rank = self.packer.rank
        if rank in self.remote:
            run, share = self.packer.pack_device_run(bucket)
            if len(run):
                dist.send(run, PUBLISHER, group=self.group)
            return share
        shares = []
        for part, path in enumerate(paths):
            with opened(path, self.packer.form(bucket).size, self.packer.device) as address:
                shares.append(self.packer.pack_at(bucket, part, address))
        if rank == PUBLISHER:
            for other in self.remote:
                self._receive(bucket, other)
        return total(shares)

    def release(self, bucket: int | None = None) -> None:
        """The memory of `bucket`, or of all, may take another one: nobody who counts reads it any more. An engine that
        was late and still does finds other checksums."""
        for done in list(self._held) if bucket is None else [bucket]:
            if done in self._held:
                self._free.extend(self._held.pop(done).values())

    def close(self) -> None:
        """Give the device its memory back; the next publication takes it anew. Not while one is under way."""
        self.release()
        while self._free:
            self._free.pop().close()

    def _take(self) -> DeviceMemory:
        """Memory for any part of any bucket."""
        if self._free:
            return self._free.pop()
        size = max(self.packer.form(number).size for number in range(self.packer.plan.count))
        return DeviceMemory(size, self.packer.device)

    def _receive(self, bucket: int, other: int) -> None:
        plan, form = self.packer.plan, self.packer.form(bucket)
        pieces = pieces_of(plan, plan.moves_of(other, bucket), form, None)
        _, size = compact(pieces)
        if not size:
            return
        device = self.packer.device
        run = torch.empty(size, dtype=torch.uint8, device=device)
        dist.recv(run, other, group=self.group)
        names = [f"what trainer rank {other} sent"]
        copies = DevicePlan(spread(pieces, run), bucket_bytes=form.size, names=names, bucket=str(bucket), device=device)
        # The sender's share of the checksums covers these bytes: what happens to them here is found by a receiver.
        sums, flags = (torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
        kernel_cuda.pack_at(copies, self._held[bucket][0].address, sums, flags)
        kernel_cuda.results(copies, sums)
