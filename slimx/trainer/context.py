"""A rank's part of packed micro-batches under context parallelism, and the way of arrays to its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
import torch.distributed as dist

from slimx.data.batch import MicroBatch
from slimx.data.packing import zigzag


class ContextShard:
    """One context-parallel rank's part of packed micro-batches, and per-token tensors put together again."""

    def __init__(self, size: int, rank: int, group: dist.ProcessGroup):
        self.size, self.rank, self._group = size, rank, group

    def take(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of `batch`: every array of it is cut, `lengths` still tells the whole sequences."""
        if self.size == 1:
            return batch
        index = zigzag(batch.lengths, self.size, self.rank)
        cut = {
            field.name: value[index]
            for field in fields(batch)
            if isinstance(value := getattr(batch, field.name), np.ndarray)
        }
        return replace(batch, **cut, support=None if batch.support is None else batch.support.take(index))

    def whole(self, part: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Join all ranks' parts of a per-token tensor in the order of the pack: [T / size, ...] -> [T, ...].

        Collective, no gradient."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        order = np.concatenate([zigzag(lengths, self.size, rank) for rank in range(self.size)])
        out = part.new_empty(len(order), *part.shape[1:])
        out[torch.from_numpy(order).to(part.device)] = torch.cat(parts)
        return out

    def sequence_sum(self, values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Sum `values` over the sequence of each token of this rank: [T / size] -> [T / size].

        Collective, no gradient; added in fp64, so that the order in which ranks hold the tokens does not show."""
        number = np.repeat(np.arange(len(lengths)), lengths)
        if self.size > 1:
            number = number[zigzag(lengths, self.size, self.rank)]
        place = to_device(number, values.device)
        sums = values.new_zeros(len(lengths), dtype=torch.float64).index_add_(0, place, values.detach().double())
        if self.size > 1:
            dist.all_reduce(sums, group=self._group)
        return sums[place].to(values.dtype)

    def part(self, whole: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """This rank's tokens of a tensor over the pack: [T, ...] -> [T / size, ...]."""
        if self.size == 1:
            return whole
        return whole[torch.from_numpy(zigzag(lengths, self.size, self.rank)).to(whole.device)]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Move `array` to `device` as a tensor; on the CPU it shares the array's memory.

    A copy from pageable memory would wait for everything that the GPU has queued, once per array of a micro-batch. From
    pinned memory it only takes its place in the queue; torch keeps the pinned block until the copy is done.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
