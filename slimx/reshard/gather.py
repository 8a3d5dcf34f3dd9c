"""Brings one bucket's tensors from all trainer ranks into a memory file of the publishing rank, with their checksums.

The memory file (memfd) has no name in any directory: a receiver on the same machine opens it through /proc, and the
kernel frees it when the last process that holds it ends, however it ends.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
import torch.distributed as dist

from slimx.layout.ranks import Sizes
from slimx.layout.table import Table, matrix
from slimx.reshard import kernel
from slimx.reshard.buckets import Contributions, make_buckets
from slimx.reshard.packed import PackedBucket, PackedTensor

PUBLISHER = 0
"""The rank that gathers."""


class Gatherer:
    """One rank's side of the gather: all ranks call `gather(bucket)` together, in the same order."""

    def __init__(
        self,
        table: Table,
        sizes: Sizes,
        rank: int,
        parameters: dict[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        group: dist.ProcessGroup,
    ):
        self.rank, self.sizes, self.parameters, self.dtype, self.group = rank, sizes, parameters, dtype, group
        self.buckets = make_buckets(table, dtype.itemsize, bucket_bytes)
        self.contributions = Contributions(table, sizes, self.buckets, dtype.itemsize)
        self._files: list[int] = []

    def gather(self, bucket: int) -> PackedBucket | None:
        """One collective; the packed bucket on the publisher, None elsewhere. Kept until `release`."""
        mine, length = self._packed(bucket), max(per_rank[bucket] for per_rank in self.contributions.nbytes)
        if self.sizes.world == 1:
            return self._assemble(bucket, [mine])
        send = mine.new_zeros(length)
        send[: len(mine)] = mine
        received = [torch.empty_like(send) for _ in range(self.sizes.world)] if self.rank == PUBLISHER else None
        dist.gather(send, received, dst=PUBLISHER, group=self.group)
        return self._assemble(bucket, received) if received is not None else None

    def forms(self) -> list[dict[str, str]]:
        """Per bucket the tensors that it brings: name -> "dtype:d0,d1"."""
        name = str(self.dtype).removeprefix("torch.")
        return [{t.name: f"{name}:{','.join(map(str, t.shape))}" for t in bucket.tensors} for bucket in self.buckets]

    def release(self) -> None:
        """Give the memory files back; receivers that still map one keep it alive for themselves."""
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _packed(self, bucket: int) -> torch.Tensor:
        """This rank's contribution, uint8 [bytes], in host memory."""
        parts, item = self.contributions.parts[self.rank][bucket], self.dtype.itemsize
        out = torch.empty(self.contributions.nbytes[self.rank][bucket], dtype=torch.uint8)
        # On CUDA a parameter crosses to the host once; on the CPU this is the parameter's own memory.
        host = {name: self.parameters[name].detach().to("cpu") for name in {part.parameter for part in parts}}
        rows = []
        for part in parts:
            rect, source = part.rect, host[part.parameter]
            source = source.view(source.shape[0], -1)
            view = source[rect.local_row : rect.local_row + rect.rows, rect.local_col : rect.local_col + rect.cols]
            rows.append(kernel.rectangle(view, tensor=0, pos=0, pos_ld=rect.cols * item, dst=part.at))
        kernel.pack(np.array(rows, dtype=kernel.PIECE), out, np.zeros(1, np.uint64))
        return out

    def _assemble(self, bucket: int, received: list[torch.Tensor]) -> PackedBucket:
        plan, item = self.buckets[bucket], self.dtype.itemsize
        memory, path = self._memory(plan.size)
        sums = kernel.seeds([tensor.nbytes for tensor in plan.tensors])
        rows = []
        for rank, bytes_in in enumerate(received):
            for part in self.contributions.parts[rank][bucket]:
                rect, tensor = part.rect, plan.tensors[part.tensor]
                width = matrix(tensor.shape)[1] * item
                place = rect.row * width + rect.col * item
                run = bytes_in[part.at : part.at + rect.rows * rect.cols * item].view(rect.rows, rect.cols * item)
                rows.append(
                    kernel.rectangle(
                        run, tensor=part.tensor, pos=place, pos_ld=width, dst=tensor.offset + place, dst_ld=width
                    )
                )
        kernel.pack(np.array(rows, dtype=kernel.PIECE), memory, sums)
        name = str(self.dtype).removeprefix("torch.")
        return PackedBucket(
            path,
            plan.size,
            tuple(
                PackedTensor(t.name, name, t.shape, t.offset, t.nbytes, int(total))
                for t, total in zip(plan.tensors, sums, strict=True)
            ),
        )

    def _memory(self, size: int) -> tuple[torch.Tensor, str]:
        file = os.memfd_create("slimx-bucket", os.MFD_CLOEXEC)
        self._files.append(file)
        os.ftruncate(file, size)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8), f"/proc/{os.getpid()}/fd/{file}"
