"""The parameters of one trainer rank, in the order in which megatron-core's modules register them.

Layers with the same rows have the same parameters: they are made once for each kind of layer and size of split, and
shared by every rank and layout that is asked about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from slimx.config.sections.trainer import Lora
from slimx.extras.lora.targets import adapts
from slimx.layout.parts import matrix
from slimx.layout.patterns import Sources
from slimx.layout.ranks import Sizes, coordinates
from slimx.layout.table import Row, Stage, Table

_BUFFER = "mlp.router.expert_bias"
"""A module's buffer, not a parameter: it is not trained, and moves with no optimizer."""
_ORDER = (
    "embedding.",
    "enorm.",
    "hnorm.",
    "eh_proj.",
    "input_layernorm.",
    # A delta net's own come before those of its modules.
    "self_attention.dt_bias",
    "self_attention.A_log",
    "self_attention.in_proj.weight",
    "self_attention.in_proj.layer_norm_weight",
    "self_attention.conv1d.",
    "self_attention.out_norm.",
    "self_attention.out_proj.",
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
    "self_attention.kv_layernorm.",
    # A Mamba-2 mixer's own come before those of its modules.
    "mixer.conv1d_weight",
    "mixer.conv1d_bias",
    "mixer.dt_bias",
    "mixer.A_log",
    "mixer.D",
    "mixer.in_proj.weight",
    "mixer.in_proj.layer_norm_weight",
    "mixer.norm.",
    "mixer.out_proj.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc2.",
    "mlp.experts.linear_fc1.weight",
    "mlp.experts.linear_fc1.bias",
    "mlp.experts.linear_fc2.weight",
    "mlp.experts.linear_fc2.bias",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
    "mlp.shared_experts.",
    "final_layernorm.",
    "final_norm.",
    "output_layer.",
)
"""Beginnings of names within a layer, in the order in which megatron-core's modules register their parameters (with
torch's layers; Transformer Engine's have a norm before its weight). It decides which rank's share an aligned gap falls
in, and nothing else: a name that is not here comes last."""
_ENDS = ("embedding.", "output_layer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRun:
    """`count` parameters of `elements` elements each, one behind the other in one buffer."""

    name: str
    """Name of the parameters, as in the weight table."""
    chunk: int
    elements: int
    count: int
    dtype: str
    expert: bool = False
    """True if gradients are summed over the expert groups."""
    tied: bool = False
    """True if another pipeline stage holds the same parameter: megatron-core gives it a bucket of its own."""
    trained: bool = True
    parameter: bool = True
    """False: a buffer of its module."""
    quantised: bool = False
    """True if a publication in fp8 makes blocks of it."""
    adapted: bool = False
    """True if an adapter stands beside it."""
    orthogonalised: bool = False
    """True if Muon takes it: a matrix, neither embedding nor output layer."""


class Holdings:
    """Parameters of one model that the ranks of any layout hold."""

    def __init__(self, table: Table, dtype: str, frozen: Collection[Sources] = (), lora: Lora | None = None):
        """`dtype`: of the model's parameters; `frozen`: parameters that are not trained."""
        self.table, self.dtype, self.frozen, self.lora = table, dtype, frozen, lora
        self._rows: dict[Stage, list[Row]] = {
            stage: sorted((row for row in table.rows if row.stage == stage), key=_order)
            for stage in ("first", "layer", "last", "mtp")
        }
        self._kinds: dict[tuple[Stage, int], tuple[tuple[int, ...], tuple[Row, ...]]] = {}
        """Rows of each layer by (stage, layer): a key that tells the same rows apart from others, and the rows."""
        self._shapes: dict[tuple[int, int], tuple[int, int]] = {}
        self._made: dict[tuple[object, ...], tuple[ParameterRun, ...]] = {}

    def runs(self, sizes: Sizes, rank: int) -> list[ParameterRun]:
        """Parameters that trainer rank `rank` holds, in the order of its modules."""
        return [run for block in self._blocks(sizes, rank) for run in block]

    def elements(self, sizes: Sizes, rank: int) -> int:
        """Trained elements of trainer rank `rank`; gaps that align its buffers not counted."""
        blocks = self._blocks(sizes, rank)
        once = {id(block): sum(run.elements * run.count for run in block if run.trained) for block in blocks}
        return sum(once[id(block)] for block in blocks)

    def unlike_stages(self, sizes: Sizes) -> list[int]:
        """Pipeline stages whose layers are of other kinds than those of each stage before. The first of a kind has most
        micro-batches in flight."""
        # Layers of a kind share their block.
        kinds = [tuple(map(id, self._blocks(sizes, stage * sizes.stage))) for stage in range(sizes.pipeline)]
        return [stage for stage, kind in enumerate(kinds) if kind not in kinds[:stage]]

    def _blocks(self, sizes: Sizes, rank: int) -> list[tuple[ParameterRun, ...]]:
        table, place = self.table, coordinates(rank, sizes)
        counts = sizes.split or (table.layers // sizes.stages,) * sizes.stages
        out: list[tuple[ParameterRun, ...]] = []
        for chunk in range(sizes.virtual):
            stage = chunk * sizes.pipeline + place.pipeline
            first = sum(counts[:stage])

            def of(part: Stage, layer: int, chunk: int = chunk) -> tuple[ParameterRun, ...]:
                return self._of(part, layer, chunk, sizes, place.expert)

            if stage == 0:
                out.append(of("first", 0))
            out += [of("layer", layer) for layer in range(first, first + counts[stage])]
            if stage == sizes.stages - 1:
                # megatron-core's order: the decoder's last norm, layers of multi-token prediction, the output layer.
                last = of("last", 0) + (self._copies(chunk, sizes) if stage else ())
                mtp = [of("mtp", layer) for layer in range(table.layers, table.layers + table.mtp_layers)]
                embedding, output = (tuple(run for run in last if run.name.startswith(end)) for end in _ENDS)
                out += [embedding, tuple(run for run in last if not run.name.startswith(_ENDS)), *mtp, output]
        return out

    def _of(self, stage: Stage, layer: int, chunk: int, sizes: Sizes, expert: int) -> tuple[ParameterRun, ...]:
        """Parameters of one layer of `stage`."""
        if (stage, layer) not in self._kinds:
            rows = tuple(row for row in self._rows[stage] if row.layers is None or layer in row.layers)
            self._kinds[stage, layer] = tuple(map(id, rows)), rows
        kind, rows = self._kinds[stage, layer]
        own = (layer, expert) if self.frozen else ()  # without frozen parameters only sizes and rows make a difference
        key = kind, chunk, sizes.tensor, sizes.expert_tensor, sizes.expert, sizes.pipeline > 1, own
        if key not in self._made:
            self._made[key] = tuple(run for row in rows for run in self._run(row, layer, chunk, sizes, expert))
        return self._made[key]

    def _copies(self, chunk: int, sizes: Sizes) -> tuple[ParameterRun, ...]:
        """Parameters of the first stage that the last one holds once more."""
        rows = [(row, name) for row in self.table.rows for stage, name in row.copies if stage == "last"]
        return tuple(replace(run, name=name) for row, name in rows for run in self._run(row, 0, chunk, sizes, 0))

    def _run(self, row: Row, layer: int, chunk: int, sizes: Sizes, expert: int) -> Iterator[ParameterRun]:
        parameter, (rows, cols) = not row.name.endswith(_BUFFER), self._shape(row, sizes)
        adapted = self.lora is not None and adapts(self.lora.targets, row.name)
        alike = {
            "chunk": chunk,
            "dtype": row.dtype or self.dtype,
            "expert": row.per_expert and sizes.expert > 1,
        }
        for frozen, count in self._counts(row, layer, sizes, expert):
            yield ParameterRun(
                name=row.name,
                elements=rows * cols,
                count=count,
                tied=bool(row.copies) and sizes.pipeline > 1,
                trained=parameter and not frozen,
                parameter=parameter,
                quantised=row.quantised,
                adapted=adapted,
                orthogonalised=_orthogonalised(row),
                **alike,
            )
            for _ in range(count if adapted else 0):  # A and B beside each matrix
                yield ParameterRun(name=f"{row.name}.lora_a", elements=self.lora.rank * cols, count=1, **alike)
                yield ParameterRun(name=f"{row.name}.lora_b", elements=rows * self.lora.rank, count=1, **alike)

    def _shape(self, row: Row, sizes: Sizes) -> tuple[int, int]:
        """Rows and columns of a rank's shard."""
        size = (sizes.expert_tensor if row.per_expert else sizes.tensor) if row.axis is not None else 1
        if (id(row), size) not in self._shapes:
            self._shapes[id(row), size], _ = row.map.local([matrix(s) for _, s in row.sources], row.axis, 0, size)
        return self._shapes[id(row), size]

    def _counts(self, row: Row, layer: int, sizes: Sizes, expert: int) -> list[tuple[bool, int]]:
        """Pairs of frozen or not and how many, in the order of the rank's experts."""
        experts = max(1, self.table.experts // sizes.expert)
        own = range(expert * experts, (expert + 1) * experts) if row.per_expert else range(1)
        if not self.frozen:
            return [(False, len(own))]
        frozen = [row.names(layer, number) in self.frozen for number in own]
        return [(which, len(list(group))) for which, group in groupby(frozen)]


def _orthogonalised(row: Row) -> bool:
    return all(len(shape) == 2 for _, shape in row.sources) and not row.name.startswith(_ENDS)


def _order(row: Row) -> int:
    name = row.name.split("{layer}.", 1)[-1].removeprefix("mtp_model_layer.").removeprefix("decoder.")
    return next((number for number, head in enumerate(_ORDER) if name.startswith(head)), len(_ORDER))
