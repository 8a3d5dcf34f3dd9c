"""Splitting of packed micro-batches over context-parallel ranks, joining of their results, and transfer of arrays to
the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
import torch.distributed as dist

from slimx.data.batch import MicroBatch
from slimx.data.packing import zigzag


class ContextShard:
    """Splits packed micro-batches for one of `size` context-parallel ranks, and joins the ranks' per-token tensors. T
    is the number of tokens of a packed micro-batch."""

    def __init__(self, size: int, rank: int, group: dist.ProcessGroup):
        self.size = size
        self.rank = rank
        self._group = group

    def take(self, batch: MicroBatch) -> MicroBatch:
        """Returns `batch` with only this rank's tokens. All arrays are sliced; `lengths` still contains the lengths of
        the full sequences."""
        if self.size == 1:
            return batch
        index = zigzag(batch.lengths, self.size, self.rank)
        cut = {}
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, np.ndarray):
                cut[field.name] = value[index]
        return replace(batch, **cut, support=None if batch.support is None else batch.support.take(index))

    def gather(self, part: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Gathers a per-token tensor from the context-parallel ranks, in the order of the packed tokens: [T / size,
        ...] -> [T, ...]. `lengths`: lengths of the packed sequences. Collective; not differentiable."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        order = np.concatenate([zigzag(lengths, self.size, rank) for rank in range(self.size)])
        out = part.new_empty(len(order), *part.shape[1:])
        out[torch.from_numpy(order).to(part.device)] = torch.cat(parts)
        return out

    def sequence_sum(self, values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Returns, for each of this rank's tokens, the sum of `values` over the token's whole sequence: [T / size] ->
        [T / size]. Collective; not differentiable. Sums are computed in fp64, so the split of tokens over ranks has a
        negligible effect."""
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        if self.size > 1:
            sequence = sequence[zigzag(lengths, self.size, self.rank)]
        index = to_device(sequence, values.device)
        sums = values.new_zeros(len(lengths), dtype=torch.float64).index_add_(0, index, values.detach().double())
        if self.size > 1:
            dist.all_reduce(sums, group=self._group)
        return sums[index].to(values.dtype)

    def local(self, full: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Selects this rank's tokens from a per-token tensor of the packed sequences: [T, ...] -> [T / size, ...]."""
        if self.size == 1:
            return full
        return full[torch.from_numpy(zigzag(lengths, self.size, self.rank)).to(full.device)]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies `array` to `device` as a tensor, through pinned memory; if the device is the CPU, the tensor shares the
    array's memory instead.

    A copy from pageable memory would wait for all work that is queued on the GPU, once per array of a micro-batch. A
    copy from pinned memory is only queued, and torch keeps the pinned memory until the copy is done."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
