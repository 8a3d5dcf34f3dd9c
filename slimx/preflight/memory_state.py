"""Bytes of weights, gradients and optimizer state on one trainer rank, counted as megatron-core 0.16.1 allocates them.

    weights     one buffer per model chunk, kind of parallelism (dense, experts) and dtype; without the distributed
                optimizer one tensor per parameter
    gradients   a buffer of fp32 of the same length
    optimizer   Adam's two moments in fp32, and fp32 main weights of what is not fp32 itself: of all, or (distributed
                optimizer) of this rank's even share of each buffer
    experts     count as dense where the expert parallel size is 1: their gradients are summed over the same ranks

With the distributed optimizer every parameter starts at a multiple of 64 elements and every bucket ends at one of 128
and of the ranks that share it (`param_and_grad_buffer.py`), so the figures hold to the byte: `sizes()` of a trainer's
`slimx.trainer.offload.Offload` says the same after a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm

import numpy as np

from slimx.config.trainer import Trainer
from slimx.layout.parts import matrix
from slimx.layout.patterns import Sources
from slimx.layout.ranks import Coordinates, Sizes, coordinates
from slimx.layout.table import Entry, Row, Table
from slimx.reshard.precision import ITEMSIZE

FP32 = 4
ALIGN, BUCKET_ALIGN = 64, 128
"""Elements: of the start of a parameter, and of the end of a bucket."""
_BUFFER = "mlp.router.expert_bias"
"""A module's buffer, not a parameter: it is not trained, and moves with no optimizer."""
_ORDER = (
    "embedding.",
    "enorm.",
    "hnorm.",
    "eh_proj.",
    "input_layernorm.",
    "self_attention.core_attention.",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc2.",
    "mlp.experts.linear_fc1.weight",
    "mlp.experts.linear_fc1.bias",
    "mlp.experts.linear_fc2.weight",
    "mlp.experts.linear_fc2.bias",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
    "mlp.shared_experts.",
    "final_layernorm.",
    "output_layer.",
)
"""Beginnings of names within a layer, in the order in which megatron-core's modules register their parameters (with
torch's layers; Transformer Engine's have a norm before its weight). It decides which rank's share an aligned gap falls
in, and nothing else: a name that is not here comes last."""


@dataclass(frozen=True, slots=True)
class ParameterRun:
    """`count` parameters of `elements` elements each, one behind the other in one buffer."""

    name: str
    """As in the weight table, with the layer filled in."""
    chunk: int
    elements: int
    count: int
    dtype: str
    expert: bool
    """Whether its gradients are summed over the expert groups."""
    tied: bool
    """Whether another pipeline stage holds the same parameter: megatron-core gives it a bucket of its own."""
    trained: bool
    parameter: bool
    """False: a buffer of its module."""
    quantised: bool = False
    """Whether a publication in fp8 makes blocks of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Of one trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    """On the device and on the host together."""
    moments: int
    """Of `optimizer`: Adam's two moments, which `trainer.optimizer.offload` moves to the host."""
    elements: int
    """Parameters and buffers that the rank holds, gaps not counted."""
    largest: int
    """Elements of its largest parameter."""
    quantised: int
    """Elements of what a publication in fp8 makes blocks of."""


def parameter_runs(
    table: Table, sizes: Sizes, rank: int, dtype: str, frozen: Collection[Sources] = ()
) -> list[ParameterRun]:
    """What trainer rank `rank` holds, in the order of its modules; `dtype`: of the model's parameters."""
    place = coordinates(rank, sizes)
    counts = sizes.split or (table.layers // sizes.stages,) * sizes.stages
    held = _Held(table, sizes, place, dtype, frozen)
    out: list[ParameterRun] = []
    for chunk in range(sizes.virtual):
        stage = chunk * sizes.pipeline + place.pipeline
        first = sum(counts[:stage])
        layers = range(first, first + counts[stage])
        if stage == 0:
            out += held.runs("first", (0,), chunk)
        out += held.runs("layer", layers, chunk)
        if stage == sizes.stages - 1:
            # megatron-core's order: the decoder's last norm, the layers of multi-token prediction, the output layer.
            last = held.runs("last", (0,), chunk) + (held.copies(chunk) if stage else [])
            output = [run for run in last if run.name.startswith("output_layer.")]
            mtp = held.runs("mtp", range(table.layers, table.layers + table.mtp_layers), chunk)
            embedding = [run for run in last if run.name.startswith("embedding.")]
            out += embedding + [run for run in last if run not in output + embedding] + mtp + output
    return out


class _Held:
    """The rows of a table as one rank holds them; layers repeat the same sizes, which are computed once."""

    def __init__(self, table: Table, sizes: Sizes, place: Coordinates, dtype: str, frozen: Collection[Sources]):
        self.table, self.sizes, self.dtype, self.frozen = table, sizes, dtype, frozen
        experts = max(1, table.experts // sizes.expert)
        self._experts = range(place.expert * experts, (place.expert + 1) * experts)
        self._rows: dict[str, list[tuple[Row, int]]] = {}

    def runs(self, stage: str, layers: range | tuple[int, ...], chunk: int) -> list[ParameterRun]:
        """Of the rows of `stage`, layer by layer."""
        if stage not in self._rows:
            rows = sorted((row for row in self.table.rows if row.stage == stage), key=_order)
            self._rows[stage] = [(row, self._elements(row)) for row in rows]
        return [
            run
            for layer in layers
            for row, elements in self._rows[stage]
            if row.layers is None or layer in row.layers
            for run in self._of(row, elements, layer, chunk)
        ]

    def copies(self, chunk: int) -> list[ParameterRun]:
        """Parameters of the first stage that the last one holds once more."""
        rows = [(row, name) for row in self.table.rows for stage, name in row.copies if stage == "last"]
        return [replace(run, name=name) for row, name in rows for run in self._of(row, self._elements(row), 0, chunk)]

    def _elements(self, row: Row) -> int:
        size = (self.sizes.expert_tensor if row.per_expert else self.sizes.tensor) if row.axis is not None else 1
        (rows, cols), _ = row.map.local([matrix(shape) for _, shape in row.sources], row.axis, 0, size)
        return rows * cols

    def _of(self, row: Row, elements: int, layer: int, chunk: int) -> Iterator[ParameterRun]:
        parameter = not row.name.endswith(_BUFFER)
        number = layer - self.table.layers if row.stage == "mtp" else layer
        for frozen, count in self._counts(row, layer):
            yield ParameterRun(
                name=row.name.replace("{layer}", str(number)),
                chunk=chunk,
                elements=elements,
                count=count,
                dtype=row.dtype or self.dtype,
                expert=row.per_expert and self.sizes.expert > 1,
                tied=bool(row.copies) and self.sizes.pipeline > 1,
                trained=parameter and not frozen,
                parameter=parameter,
                quantised=row.quantised,
            )

    def _counts(self, row: Row, layer: int) -> list[tuple[bool, int]]:
        """Whether frozen, and how many of them, in the order of the rank's experts."""
        own = self._experts if row.per_expert else range(1)
        if not self.frozen:
            return [(False, len(own))]
        frozen = [Entry(row, layer, expert).sources in self.frozen for expert in own]
        return [(which, len(list(group))) for which, group in groupby(frozen)]


def _order(row: Row) -> int:
    name = row.name.split("{layer}.", 1)[-1].removeprefix("transformer_layer.").removeprefix("decoder.")
    return next((number for number, head in enumerate(_ORDER) if name.startswith(head)), len(_ORDER))


def state_bytes(runs: list[ParameterRun], trainer: Trainer, sizes: Sizes, rank: int) -> StateBytes:
    """Of the rank that holds `runs`, after its first optimizer step."""
    place = coordinates(rank, sizes)
    dense = place.data * sizes.context + place.context, sizes.data * sizes.context
    experts = place.expert_data, sizes.stage // (sizes.expert * sizes.expert_tensor)
    weights = gradients = main = moments = 0
    for run in runs:
        if run.parameter and not (run.trained and trainer.distributed_optimizer):
            weights += run.elements * run.count * ITEMSIZE[run.dtype]
    trained = sorted((run for run in runs if run.trained), key=_buffer)
    for (_, expert, dtype), group in groupby(trained, key=_buffer):
        number, ranks = experts if expert else dense
        if trainer.distributed_optimizer:
            length, owned = _shard(list(group), number, ranks)
            weights += length * ITEMSIZE[dtype]
        else:
            length = owned = sum(run.elements * run.count for run in group)
        gradients += length * FP32
        main += owned * FP32 if dtype != "float32" else 0
        moments += owned * 2 * FP32
    return StateBytes(
        weights=weights,
        gradients=gradients,
        optimizer=main + moments,
        moments=moments,
        elements=sum(run.elements * run.count for run in runs),
        largest=max(run.elements for run in runs),
        quantised=sum(run.elements * run.count for run in runs if run.quantised),
    )


def _buffer(run: ParameterRun) -> tuple[int, bool, str]:
    return run.chunk, run.expert, run.dtype


def _shard(runs: list[ParameterRun], number: int, ranks: int) -> tuple[int, int]:
    """Length of a buffer in elements, and how many elements of parameters are in the share of rank `number` of
    `ranks`."""
    buckets: list[list[ParameterRun]] = [[]]
    for run in reversed(runs):  # buffers are filled in the order of the backward pass
        if run.tied and buckets[-1]:
            buckets.append([])
        buckets[-1].append(run)
        if run.tied:
            buckets.append([])
    length = owned = 0
    for bucket in filter(None, buckets):
        elements = np.repeat([run.elements for run in bucket], [run.count for run in bucket]).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(-(-elements // ALIGN) * ALIGN)])
        end = int(starts[-2] + elements[-1])
        multiple = lcm(ranks, BUCKET_ALIGN)
        size = -(-end // multiple) * multiple
        first, last = number * (size // ranks), (number + 1) * (size // ranks)
        inside = np.minimum(starts[:-1] + elements, last) - np.maximum(starts[:-1], first)
        length, owned = length + size, owned + int(inside.clip(min=0).sum())
    return length, owned
