"""Weights, gradients and optimizer state leave the device while engines generate on it, and come back.

What moves is storage, not tensors: it shrinks to 0 bytes and grows again, so that every view into it (parameters in
Megatron's buffers, main gradients, shards of the distributed optimizer) stays the same object. Addresses may change.
The same code runs on the CPU, where it moves to another host buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from slimx.numerics.rounding import Rounding

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's moments, each as large as its parameter."""
STATE = (*MOMENTS, "momentum_buffer")
"""Names of optimizer state as large as its parameter: Adam's two, and Muon's one."""


@dataclass(slots=True)
class Moved:
    """Storages that leave together."""

    storages: list[torch.UntypedStorage]
    keep: bool
    """Their values come back; zeros otherwise."""
    sizes: list[int] = field(default_factory=list)
    """While away: bytes of each storage."""
    host: dict[int, torch.Tensor] = field(default_factory=dict)
    """By the storage's position: its bytes in (pinned) host memory, kept for the next time."""

    @property
    def away(self) -> bool:
        return bool(self.sizes)

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)


class Offload:
    """Moves one trainer rank's `weights`, and `training` (gradients and optimizer state), to the host and back."""

    def __init__(self, chunks: list[Any], optimizer: Any, device: torch.device, rounding: Rounding):
        self.chunks, self.optimizer, self.device, self.rounding = chunks, optimizer, device, rounding
        self._weights = Moved([], keep=True)
        self._state = Moved([], keep=True)
        self._gradients = Moved([], keep=False)

    @property
    def away(self) -> tuple[str, ...]:
        """Names of the parts that are on the host now."""
        weights = ("weights",) if self._weights.away else ()
        return weights + (("training",) if self._state.away or self._gradients.away else ())

    def sizes(self) -> dict[str, int]:
        """Bytes on the device by kind, at this moment."""
        weights, gradients, state = self._collect()
        kinds = {"weights": weights, "gradients": gradients, "optimizer state": state}
        return {kind: sum(storage.nbytes() for storage in storages) for kind, storages in kinds.items()}

    @torch.no_grad()
    def offload(self, *, weights: bool = True) -> int:
        """Move gradients and optimizer state, and the weights if asked to; returns the bytes given back. A second
        call does nothing."""
        before = sum(self.sizes().values())
        if "training" not in self.away:
            # bf16 models: fp32 copies of the gradients that only a step needs.
            self.optimizer.zero_grad(set_to_none=True)
            self.rounding.release(self.chunks)
            held, gradients, state = self._collect()
            # State is made by the first step, so what there is is looked up every time.
            _refresh(self._weights, held)
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
        """Bring back the weights and, unless only they are needed, all the rest. A second call does nothing."""
        self._back(self._weights)
        if training:
            self._back(self._state)
            self._back(self._gradients)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _collect(self) -> tuple[list[torch.UntypedStorage], ...]:
        """Storages of weights, of gradients and of optimizer state; each storage once, in that order."""
        seen: set[int] = set()
        return tuple(list(_distinct(tensors, seen)) for tensors in self._tensors())

    def _tensors(self) -> tuple[list[torch.Tensor], ...]:
        weights = [parameter.data for chunk in self.chunks for parameter in chunk.parameters()]
        buffers = [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        weights += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        gradients = [buffer.grad_data for buffer in buffers]
        state: list[torch.Tensor] = []
        for part in self.optimizer.chained_optimizers:
            if part.optimizer is not None:
                state += [parameter.data for group in part.optimizer.param_groups for parameter in group["params"]]
                state += [values[key] for values in part.optimizer.state.values() for key in STATE if key in values]
        # Moments that live on the host (trainer.optimizer.offload_fraction) do not move.
        return weights, gradients, [tensor for tensor in state if tensor.device.type == self.device.type]

    def _out(self, moved: Moved) -> None:
        moved.sizes = [storage.nbytes() for storage in moved.storages]
        for number, storage in enumerate(moved.storages):
            if moved.keep:
                host = moved.host.get(number)
                if host is None or host.numel() != storage.nbytes():
                    # Not by torch.empty(pin_memory=...) alone: on the CPU there is nothing to pin.
                    pinned = self.device.type == "cuda"
                    host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
                    moved.host[number] = host
                host.copy_(_bytes_of(storage), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the copies are done before their source goes
        for storage in moved.storages:
            storage.resize_(0)

    def _back(self, moved: Moved) -> None:
        for number, (storage, size) in enumerate(zip(moved.storages, moved.sizes, strict=False)):
            storage.resize_(size)
            if moved.keep:
                _bytes_of(storage).copy_(moved.host[number], non_blocking=True)
            else:
                _bytes_of(storage).zero_()
        moved.sizes = []


def _refresh(moved: Moved, storages: list[torch.UntypedStorage]) -> None:
    if [s._cdata for s in storages] != [s._cdata for s in moved.storages]:
        moved.storages, moved.host = storages, {}


def _distinct(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
