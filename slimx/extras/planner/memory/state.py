"""Bytes of weights, gradients and optimizer state on one trainer rank, counted as megatron-core 0.19.2 allocates them.

    weights     one buffer per model chunk, kind of parallelism (dense, experts) and dtype; without the distributed
                optimizer one tensor per parameter
    gradients   a buffer of the same length, of fp32 or (trainer.grad_reduce_in_fp32) of the weights' dtype
    optimizer   Adam's two moments of trainer.optimizer.moments_dtype (Muon: one per matrix, fp32), and fp32 main
                weights of parameters in other dtypes: of all, or (distributed optimizer) of this rank's even share
                of each buffer
    experts     count as dense if the expert parallel size is 1: their gradients are summed over the same ranks

With the distributed optimizer every parameter starts at a multiple of 64 elements and every bucket ends at a multiple
of 128 and of the number of ranks that share it (`param_and_grad_buffer.py`), so the figures are exact: `sizes()` of a
trainer's `slimx.trainer.device.offload.Offload` returns the same after a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm
from typing import NamedTuple

import numpy as np

from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.memory.parameter_runs import ParameterRun
from slimx.layout.number_formats import ITEMSIZE
from slimx.layout.ranks import Sizes

FP32 = 4
ALIGN, BUCKET_ALIGN = 64, 128
"""Alignment of the start of a parameter, and of the end of a bucket, in elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of weights, gradients and optimizer state of one trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    """Bytes of optimizer state, on GPU and host together."""
    moments: int
    """Bytes of the moments, which are included in `optimizer`; `trainer.optimizer.offload_fraction` moves them to the
    host."""
    copied: int
    """Bytes of the fp32 copies that an optimizer step makes of the rank's shard of bf16 gradients."""
    elements: int
    """Number of elements of the rank's parameters and buffers, without alignment gaps."""
    quantized: int
    """Number of elements that an fp8 publication quantizes."""
    adapted: int
    """Number of weight elements on the rank that have an adapter, not counting the adapters' elements."""
    pinned_weights: int
    """Bytes of pinned host memory for copies of the weight buffers, if torch rounds sizes up to powers of two."""
    pinned_share: float
    """Ratio of allocated to copied bytes of pinned host memory, if parameters or their optimizer state are copied one
    by one and torch rounds the size of each copy up to a power of two."""


class Buffers:
    """Buffers of gradients and optimizer state for a rank's trained parameters, and the shard of each buffer that each
    data-parallel rank owns."""

    def __init__(self, runs: Sequence[ParameterRun], trainer: Trainer, sizes: Sizes):
        self.runs = runs
        self.sizes = sizes
        self.distributed = trainer.distributed_optimizer
        self._in_fp32 = trainer.grad_reduce_in_fp32
        self._moments = 2 * ITEMSIZE[trainer.optimizer.moments_dtype]
        """Bytes of the two moments of one element."""
        dense = sizes.data * sizes.context
        experts = sizes.stage // (sizes.expert * sizes.expert_tensor)
        trained = [run for run in runs if run.trained]
        trained.sort(key=_buffer_key)
        self._unused = 0
        """Bytes of second moments that Muon does not keep. Muon's state is never sharded."""
        if trainer.optimizer.kind == "muon":
            self._unused = FP32 * _elements(run for run in trained if run.orthogonalized)
        self._buffers: list[_Buffer] = []
        for (_, expert, dtype), group in groupby(trained, key=_buffer_key):
            if self.distributed:
                ranks = experts if expert else dense
                length, owned = _sharded(list(group), ranks)
            else:
                length = _elements(group)
                owned = np.array([length])
            self._buffers.append(_Buffer(expert, dtype, length, owned))

    def optimizer_bytes(self, ranks: np.ndarray) -> np.ndarray:
        """Returns the size in bytes of the optimizer state on each of `ranks`, an array of trainer ranks."""
        nbytes = np.full(len(ranks), -self._unused, dtype=np.int64)
        for buffer in self._buffers:
            nbytes += self._owned(ranks, buffer) * self._state_bytes(buffer)
        return nbytes

    def state(self, rank: int) -> StateBytes:
        """Returns the size in bytes of weights, gradients and optimizer state on `rank` after its first optimizer
        step."""
        parameter_elements = 0
        pinned_elements = 0
        unbuffered = 0
        quantized = 0
        adapted = 0
        for run in self.runs:
            elements = run.elements * run.count
            if run.quantized:
                quantized += elements
            if run.adapted:
                adapted += elements
            if not run.parameter:
                continue
            parameter_elements += elements
            pinned_elements += pinned(run.elements) * run.count
            if not run.trained or not self.distributed:
                unbuffered += elements * ITEMSIZE[run.dtype]
        pinned_share = pinned_elements / parameter_elements
        buffered = 0
        pinned_buffers = 0
        gradients = 0
        copied = 0
        optimizer = -self._unused
        moments = -self._unused
        for buffer in self._buffers:
            owned = int(self._owned(np.array([rank]), buffer)[0])
            itemsize = ITEMSIZE[buffer.dtype]
            if self.distributed:
                buffered += buffer.length * itemsize
                pinned_buffers += pinned(buffer.length * itemsize)
            gradient_itemsize = FP32 if self._in_fp32 else itemsize
            gradients += buffer.length * gradient_itemsize
            if gradient_itemsize < FP32:
                copied += owned * FP32
            optimizer += owned * self._state_bytes(buffer)
            moments += owned * self._moments
        return StateBytes(
            weights=unbuffered + buffered,
            gradients=gradients,
            optimizer=optimizer,
            moments=moments,
            copied=copied,
            elements=_elements(self.runs),
            quantized=quantized,
            adapted=adapted,
            pinned_weights=pinned_buffers + round(unbuffered * pinned_share),
            pinned_share=pinned_share,
        )

    def _state_bytes(self, buffer: _Buffer) -> int:
        """Returns the size of Adam's state in bytes per element: two moments, and an fp32 master weight unless the
        buffer's dtype is fp32."""
        if buffer.dtype == "float32":
            return self._moments
        return self._moments + FP32

    def _owned(self, ranks: np.ndarray, buffer: _Buffer) -> np.ndarray:
        """Returns, for each of `ranks`, the number of elements of `buffer` for which the rank keeps the optimizer
        state."""
        if not self.distributed:
            return buffer.owned[np.zeros_like(ranks)]
        sizes = self.sizes
        group = sizes.expert * sizes.expert_tensor if buffer.expert else sizes.tensor
        return buffer.owned[ranks % sizes.stage // group]


class _Buffer(NamedTuple):
    """One of a rank's buffers of gradients and optimizer state."""

    expert: bool
    """True if the parameters belong to routed experts."""
    dtype: str
    length: int
    """Number of elements in the buffer, including alignment gaps."""
    owned: np.ndarray
    """Number of parameter elements in the shard of each data-parallel rank."""


def _elements(runs: Iterable[ParameterRun]) -> int:
    return sum(run.elements * run.count for run in runs)


def pinned(nbytes: int) -> int:
    """Returns the size in bytes of the pinned host memory that torch allocates for a tensor of `nbytes` bytes if it
    rounds sizes up to a power of two (`slimx.runtime.allocator`)."""
    return 1 << max(0, nbytes - 1).bit_length()


def _buffer_key(run: ParameterRun) -> tuple[int, bool, str]:
    return run.chunk, run.expert, run.dtype


def _sharded(runs: list[ParameterRun], ranks: int) -> tuple[int, np.ndarray]:
    """Returns the length in elements of a buffer that is sharded over `ranks` ranks, and the number of parameter
    elements in each rank's shard. `runs`: the parameters in the buffer."""
    buckets: list[list[ParameterRun]] = [[]]
    for run in reversed(runs):  # buffers are filled in the order of the backward pass
        if run.tied and buckets[-1]:
            buckets.append([])
        buckets[-1].append(run)
        if run.tied:
            buckets.append([])
    length = 0
    owned = np.zeros(ranks, dtype=np.int64)
    for bucket in filter(None, buckets):
        elements = np.repeat([run.elements for run in bucket], [run.count for run in bucket]).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(-(-elements // ALIGN) * ALIGN)])
        end = int(starts[-2] + elements[-1])
        multiple = lcm(ranks, BUCKET_ALIGN)
        size = -(-end // multiple) * multiple
        edges = np.arange(ranks + 1) * (size // ranks)
        # Parameter elements before each edge: all parameters that start before it, minus the last one's part beyond it.
        last = np.searchsorted(starts[:-1], edges, side="right") - 1
        before = np.concatenate([[0], np.cumsum(elements)])[last] + np.minimum(edges - starts[last], elements[last])
        length += size
        owned += np.diff(before)
    return length, owned
