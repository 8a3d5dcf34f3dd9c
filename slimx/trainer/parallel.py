"""Coordinates of a trainer rank in all parallel dimensions, and its process groups."""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from slimx.errors import SlimxError
from slimx.layout.ranks import Coordinates, Sizes, coordinates
from slimx.runtime.ports import meet


class ParallelState:
    """Coordinates of this rank in all parallel dimensions, and its process groups, which are created on
    construction."""

    def __init__(
        self, sizes: Sizes, *, rank: int, init_method: str, device: torch.device, deadline_s: float, seed: int
    ):
        self.sizes = sizes
        self.rank = rank
        self.device = device
        self.coordinates: Coordinates = coordinates(rank, sizes)
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=deadline_s)
        url = urlsplit(init_method)
        store = meet(url.hostname or "", url.port or 0, rank=rank, size=sizes.world, timeout=timeout)
        dist.init_process_group(backend, store=store, world_size=sizes.world, rank=rank, timeout=timeout)
        # gloo gathers weights that are exported through host memory, even on CUDA.
        host_group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(host_group, dist.ProcessGroup)
        self.host_group = host_group
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
        """Raises SlimxError if two ranks have the same GPU, before the first NCCL collective, whose error would not
        name the ranks."""
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        devices: list[str] = [""] * self.sizes.world
        dist.all_gather_object(devices, uuid, group=self.host_group)
        first = devices.index(uuid)
        if first != self.rank:
            raise SlimxError(
                f"trainer ranks {first} and {self.rank} have the same GPU ({uuid}), but NCCL requires one GPU per "
                "rank; lower trainer.world_size to the number of GPUs",
            )

    @property
    def last_stage(self) -> bool:
        """True on ranks of the last pipeline stage, which compute logits."""
        return self.coordinates.pipeline == self.sizes.pipeline - 1

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
        """Ranks among which a step's tokens are divided: all data- and context-parallel ranks."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def destroy(self) -> None:
        """Destroys all process groups on this rank, without waiting for other ranks."""
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
