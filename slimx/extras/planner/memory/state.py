"""Bytes of weights, gradients and optimizer state on one trainer rank, counted as megatron-core 0.19.2 allocates them.

    weights     one buffer per model chunk, kind of parallelism (dense, experts) and dtype; without the distributed
                optimizer one tensor per parameter
    gradients   a buffer of the same length, of fp32 or (trainer.grad_reduce_in_fp32) of the weights' dtype
    optimizer   Adam's two moments of trainer.optimizer.moments_dtype (Muon: one of a matrix, fp32), and fp32 main
                weights of what is not fp32 itself: of all, or (distributed optimizer) of this rank's even share of
                each buffer
    experts     count as dense where the expert parallel size is 1: their gradients are summed over the same ranks

With the distributed optimizer every parameter starts at a multiple of 64 elements and every bucket ends at one of 128
and of the ranks that share it (`param_and_grad_buffer.py`), so the figures hold to the byte: `sizes()` of a trainer's
`slimx.trainer.device.offload.Offload` says the same after a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm

import numpy as np

from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.memory.parameter_runs import ParameterRun
from slimx.layout.number_formats import ITEMSIZE
from slimx.layout.ranks import Sizes

FP32 = 4
ALIGN, BUCKET_ALIGN = 64, 128
"""Elements: of the start of a parameter, and of the end of a bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of weights, gradients and optimizer state of one trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    """On the device and on the host together."""
    moments: int
    """The part of `optimizer` that is moments, which `trainer.optimizer.offload_fraction` moves to the
    host."""
    copied: int
    """fp32 copies that an optimizer step makes of the rank's share of bf16 gradients."""
    elements: int
    """Parameters and buffers that the rank holds, gaps not counted."""
    quantised: int
    """Elements of what a publication in fp8 makes blocks of."""
    adapted: int
    """Elements of the rank's weights that have an adapter, the adapters' own not counted."""
    pinned_weights: int
    """Bytes of pinned host memory that copies of the weights' buffers take where sizes are rounded up."""
    pinned_share: float
    """Bytes of pinned host memory for copies of single parameters, or of their state, over their own, likewise."""


class Buffers:
    """The buffers of gradients and optimizer state in which a rank's trained parameters lie, and every rank's share."""

    def __init__(self, runs: Sequence[ParameterRun], trainer: Trainer, sizes: Sizes):
        self.runs, self.sizes, self.distributed = runs, sizes, trainer.distributed_optimizer
        self._in_fp32 = trainer.grad_reduce_in_fp32
        self._moments = 2 * ITEMSIZE[trainer.optimizer.moments_dtype]
        """Bytes of the two moments of an element."""
        dense, experts = sizes.data * sizes.context, sizes.stage // (sizes.expert * sizes.expert_tensor)
        trained = sorted((run for run in runs if run.trained), key=_buffer)
        muon = trainer.optimizer.kind == "muon"
        self._spared = FP32 * sum(run.elements * run.count for run in trained if muon and run.orthogonalised)
        """Bytes of second moments that there are not. Muon's state is never sharded."""
        self._buffers: list[tuple[bool, str, int, np.ndarray]] = []
        """Buffers as (of experts, dtype, length, elements of parameters in each rank's share)."""
        for (_, expert, dtype), group in groupby(trained, key=_buffer):
            if self.distributed:
                length, owned = _shares(list(group), experts if expert else dense)
            else:
                length = sum(run.elements * run.count for run in group)
                owned = np.array([length])
            self._buffers.append((expert, dtype, length, owned))

    def owned(self, ranks: np.ndarray) -> np.ndarray:
        """Bytes of optimizer state of each of `ranks`."""
        return sum(
            (self._owned(ranks, at) * self._each(at) for at in range(len(self._buffers))),
            np.full(len(ranks), -self._spared, dtype=np.int64),
        )

    def of(self, rank: int) -> StateBytes:
        """Bytes of state of `rank`, after its first optimizer step."""
        runs, weights, gradients, optimizer, moments, copied = self.runs, 0, 0, 0, 0, 0
        parameters = [run for run in runs if run.parameter]
        share = sum(pinned(run.elements) * run.count for run in parameters)
        share /= sum(run.elements * run.count for run in parameters)
        for run in runs:
            if run.parameter and not (run.trained and self.distributed):
                weights += run.elements * run.count * ITEMSIZE[run.dtype]
        whole = buffers = 0
        for at, (_, dtype, length, _) in enumerate(self._buffers):
            owned = int(self._owned(np.array([rank]), at)[0])
            if self.distributed:
                weights, buffers = weights + length * ITEMSIZE[dtype], buffers + length * ITEMSIZE[dtype]
                whole += pinned(length * ITEMSIZE[dtype])
            each = FP32 if self._in_fp32 else ITEMSIZE[dtype]
            gradients += length * each
            copied += owned * FP32 if each < FP32 else 0
            optimizer += owned * self._each(at)
            moments += owned * self._moments
        return StateBytes(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer - self._spared,
            moments=moments - self._spared,
            copied=copied,
            elements=sum(run.elements * run.count for run in runs),
            quantised=sum(run.elements * run.count for run in runs if run.quantised),
            adapted=sum(run.elements * run.count for run in runs if run.adapted),
            pinned_weights=whole + round((weights - buffers) * share),
            pinned_share=share,
        )

    def _each(self, at: int) -> int:
        """Bytes of Adam's state per element: two moments, and main weights of what is not fp32 itself."""
        return self._moments + (0 if self._buffers[at][1] == "float32" else FP32)

    def _owned(self, ranks: np.ndarray, at: int) -> np.ndarray:
        expert, _, _, owned = self._buffers[at]
        inside, sizes = ranks % self.sizes.stage, self.sizes
        number = inside // (sizes.expert * sizes.expert_tensor if expert else sizes.tensor)
        return owned[number if self.distributed else np.zeros_like(ranks)]


def pinned(nbytes: int) -> int:
    """Bytes of pinned host memory that torch takes for a tensor where it rounds up to a power of two
    (`slimx.runtime.allocator`)."""
    return 1 << max(0, nbytes - 1).bit_length()


def _buffer(run: ParameterRun) -> tuple[int, bool, str]:
    return run.chunk, run.expert, run.dtype


def _shares(runs: list[ParameterRun], ranks: int) -> tuple[int, np.ndarray]:
    """Length of a buffer in elements, and how many elements of parameters are in the share of each of `ranks` ranks."""
    buckets: list[list[ParameterRun]] = [[]]
    for run in reversed(runs):  # buffers are filled in the order of the backward pass
        if run.tied and buckets[-1]:
            buckets.append([])
        buckets[-1].append(run)
        if run.tied:
            buckets.append([])
    length, owned = 0, np.zeros(ranks, dtype=np.int64)
    for bucket in filter(None, buckets):
        elements = np.repeat([run.elements for run in bucket], [run.count for run in bucket]).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(-(-elements // ALIGN) * ALIGN)])
        end = int(starts[-2] + elements[-1])
        multiple = lcm(ranks, BUCKET_ALIGN)
        size = -(-end // multiple) * multiple
        edges = np.arange(ranks + 1) * (size // ranks)
        # Elements of parameters before each edge: of all that begin before it, less what the last one has beyond it.
        last = np.searchsorted(starts[:-1], edges, side="right") - 1
        before = np.concatenate([[0], np.cumsum(elements)])[last] + np.minimum(edges - starts[last], elements[last])
        length, owned = length + size, owned + np.diff(before)
    return length, owned
