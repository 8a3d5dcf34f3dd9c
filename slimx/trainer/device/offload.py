"""Moves a rank's weights and optimizer state to host memory while engines use the device, and back. The memory of
gradients is freed, and reloaded gradients are zeros.

Tensors stay the same objects: their storage shrinks to 0 bytes and grows again, which keeps all views of the storage
valid (parameters in Megatron's buffers, main gradients, shards of the distributed optimizer). The tensors' addresses
may change. On the CPU, the same code copies to another buffer in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from slimx.numerics.rounding import Rounding

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's moments in the state of a parameter; each moment is as large as the parameter."""
STATE = (*MOMENTS, "momentum_buffer")
"""Names of the entries of a parameter's optimizer state that are as large as the parameter: Adam's two moments, and
Muon's momentum."""


@dataclass(slots=True)
class StorageGroup:
    """Storages that are offloaded and reloaded together."""

    storages: list[torch.UntypedStorage]
    keep: bool
    """True if reloading restores the values in the storages; False if it zeroes them."""
    sizes: list[int] = field(default_factory=list)
    """Size of each storage in bytes while the group is offloaded; empty otherwise."""
    host: dict[int, torch.Tensor] = field(default_factory=dict)
    """Copy of each storage in host memory (pinned on CUDA), keyed by the storage's index. Later offloads reuse this
    memory."""

    @property
    def away(self) -> bool:
        return bool(self.sizes)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.storages)


class Offload:
    """Offloads two parts of a trainer rank's memory from the device and reloads them: "weights", and "training" (the
    optimizer state, and the gradients, whose values are not kept)."""

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: ChainedOptimizer,
        device: torch.device,
        rounding: Rounding,
    ):
        self.chunks = chunks
        self.optimizer = optimizer
        self.device = device
        self.rounding = rounding
        self._weights = StorageGroup([], keep=True)
        self._state = StorageGroup([], keep=True)
        self._gradients = StorageGroup([], keep=False)

    @property
    def away(self) -> tuple[str, ...]:
        """Names of the parts that are currently offloaded."""
        parts = []
        if self._weights.away:
            parts.append("weights")
        if self._state.away or self._gradients.away:
            parts.append("training")
        return tuple(parts)

    def sizes(self) -> dict[str, int]:
        """Returns the number of bytes on the device by kind: weights, gradients, optimizer state."""
        weights, gradients, state = self._collect()
        kinds = {"weights": weights, "gradients": gradients, "optimizer state": state}
        return {kind: _nbytes(storages) for kind, storages in kinds.items()}

    @torch.no_grad()
    def offload(self, *, weights: bool = True) -> int:
        """Offloads gradients and optimizer state and, if `weights` is true, the weights as well. Returns the number of
        bytes freed on the device. Parts that are already offloaded are skipped."""
        before = sum(self.sizes().values())
        if "training" not in self.away:
            # For bf16 models this frees fp32 copies of the gradients, which are needed only during a step.
            self.optimizer.zero_grad(set_to_none=True)
            self.rounding.release(self.chunks)
            parameters, gradients, state = self._collect()
            # Storages are collected every time, because the optimizer creates its state only in the first step.
            _refresh(self._weights, parameters)
            _refresh(self._gradients, gradients)
            _refresh(self._state, state)
            self._out(self._gradients)
            self._out(self._state)
        if weights and not self._weights.away:
            self._out(self._weights)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return before - sum(self.sizes().values())

    @torch.no_grad()
    def reload(self, *, training: bool = True) -> None:
        """Reloads the weights and, if `training` is true, the gradients (as zeros) and the optimizer state. Parts that
        are not offloaded are skipped."""
        self._back(self._weights)
        if training:
            self._back(self._state)
            self._back(self._gradients)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _collect(self) -> tuple[list[torch.UntypedStorage], ...]:
        """Returns the distinct storages of weights, of gradients and of optimizer state, in this order."""
        seen: set[int] = set()
        return tuple(list(_distinct(tensors, seen)) for tensors in self._tensors())

    def _tensors(self) -> tuple[list[torch.Tensor], ...]:
        weights: list[torch.Tensor] = []
        buffered: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for chunk in self.chunks:
            weights += [parameter.data for parameter in chunk.parameters()]
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                gradients.append(buffer.grad_data)
                if buffer.param_data is not None:
                    buffered.append(buffer.param_data)
        state: list[torch.Tensor] = []
        for part in self.optimizer.chained_optimizers:
            if part.optimizer is not None:
                for group in part.optimizer.param_groups:
                    state += [parameter.data for parameter in group["params"]]
                for values in part.optimizer.state.values():
                    state += [values[key] for key in STATE if key in values]
        # Moments that are always on the host (trainer.optimizer.offload_fraction) are not moved.
        return weights + buffered, gradients, [tensor for tensor in state if tensor.device.type == self.device.type]

    def _out(self, group: StorageGroup) -> None:
        group.sizes = [storage.nbytes() for storage in group.storages]
        for index, storage in enumerate(group.storages):
            if group.keep:
                host = group.host.get(index)
                if host is None or host.numel() != storage.nbytes():
                    # Pinned memory only speeds up copies to and from a GPU.
                    pinned = self.device.type == "cuda"
                    host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
                    group.host[index] = host
                host.copy_(_bytes_of(storage), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the copies must be complete before their source is freed
        for storage in group.storages:
            storage.resize_(0)

    def _back(self, group: StorageGroup) -> None:
        for index, (storage, size) in enumerate(zip(group.storages, group.sizes, strict=False)):
            storage.resize_(size)
            if group.keep:
                _bytes_of(storage).copy_(group.host[index], non_blocking=True)
            else:
                _bytes_of(storage).zero_()
        group.sizes = []


def _refresh(group: StorageGroup, storages: list[torch.UntypedStorage]) -> None:
    if [storage._cdata for storage in storages] != [storage._cdata for storage in group.storages]:
        group.storages = storages
        group.host = {}


def _nbytes(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


def _distinct(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
