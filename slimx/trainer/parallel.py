"""A trainer rank among the others: its process groups, its part of micro-batches under context parallelism, and the
way of arrays to its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import timedelta
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from slimx.data.batch import MicroBatch
from slimx.data.packing import zigzag
from slimx.errors import SlimxError
from slimx.layout.ranks import Coordinates, Sizes, coordinates
from slimx.runtime.ports import meet


class ParallelState:
    """This rank's place in every parallel dimension, and the process groups behind it: made here, destroyed here."""

    def __init__(
        self, sizes: Sizes, *, rank: int, init_method: str, device: torch.device, deadline_s: float, seed: int
    ):
        self.sizes, self.rank, self.device = sizes, rank, device
        self.place: Coordinates = coordinates(rank, sizes)
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=deadline_s)
        where = urlsplit(init_method)
        store = meet(where.hostname or "", where.port or 0, rank=rank, size=sizes.world, timeout=timeout)
        dist.init_process_group(backend, store=store, world_size=sizes.world, rank=rank, timeout=timeout)
        # Weights that leave through host memory are gathered by gloo on every device.
        self.host_group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
        if backend == "nccl":
            self._check_devices()
        parallel_state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            sizes.virtual if sizes.virtual > 1 else None,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            distributed_timeout_minutes=max(1, int(deadline_s // 60)),
        )
        model_parallel_cuda_manual_seed(seed)

    def _check_devices(self) -> None:
        """Refuse two ranks on one GPU before NCCL's first collective, which would fail without saying which."""
        mine = str(torch.cuda.get_device_properties(self.device).uuid)
        devices: list[str] = [""] * self.sizes.world
        dist.all_gather_object(devices, mine, group=self.host_group)
        first = devices.index(mine)
        if first != self.rank:
            raise SlimxError(
                f"trainer ranks {first} and {self.rank} were given the same GPU ({mine}), and NCCL wants one for each; "
                "lower trainer.world_size to the number of GPUs",
            )

    @property
    def last_stage(self) -> bool:
        """True on the ranks of the last pipeline stage, which compute logits."""
        return self.place.pipeline == self.sizes.pipeline - 1

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def context_group(self) -> dist.ProcessGroup:
        return parallel_state.get_context_parallel_group()

    @property
    def token_group(self) -> dist.ProcessGroup:
        """The ranks among which the tokens of a step are divided: data parallel times context parallel."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def destroy(self) -> None:
        """Leave every group. Other ranks are not waited for."""
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


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
