"""The parameters of one trainer rank, in the order in which megatron-core's modules register them.

Layers with the same rows of the weight table have the same parameters. So the parameters of a layer are computed once
for each kind of layer and each number of shards, and reused for all ranks and layouts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from slimx.config.sections.trainer import Lora
from slimx.extras.lora.targets import adapts
from slimx.layout.parts import matrix
from slimx.layout.patterns import Sources
from slimx.layout.ranks import Sizes, coordinates
from slimx.layout.table import Row, Stage, Table

_BUFFER = "mlp.router.expert_bias"
"""Ending of the name of a router's bias buffer in the weight table. A buffer is not a parameter: no optimizer updates
it."""
_ORDER = (
    "embedding.",
    "enorm.",
    "hnorm.",
    "eh_proj.",
    "input_layernorm.",
    # A delta net registers its own parameters before those of its submodules.
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
    # A Mamba-2 mixer registers its own parameters before those of its submodules.
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
"""Prefixes of parameter names within a layer, in the order in which megatron-core's modules register their parameters.

This is the order in torch's layers; in Transformer Engine's layers a norm precedes the weight of the linear layer that
it is fused with. The order only decides to which rank an alignment gap belongs. Names without a prefix in the list come
last."""
_ENDS = ("embedding.", "output_layer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRun:
    """Sequence of `count` adjacent parameters in one of megatron-core's buffers, each with `elements` elements."""

    name: str
    """Name of the parameters in the weight table."""
    chunk: int
    elements: int
    count: int
    dtype: str
    expert: bool = False
    """True if the gradients of these parameters are summed over expert-data-parallel groups."""
    tied: bool = False
    """True if another pipeline stage has a copy of the parameter; megatron-core then puts the parameter into a separate
    bucket."""
    trained: bool = True
    parameter: bool = True
    """True for parameters, False for a module's buffer."""
    quantized: bool = False
    """True if publications in fp8 quantize these parameters."""
    adapted: bool = False
    """True if each of these parameters has a low-rank adapter."""
    orthogonalized: bool = False
    """True if Muon updates these parameters, as it does all matrices except the embedding and the output layer."""


class Holdings:
    """All parameters of one model, with methods that derive the parameters of any rank in any layout."""

    def __init__(self, table: Table, dtype: str, frozen: Collection[Sources] = (), lora: Lora | None = None):
        """Sorts the rows of the weight table `table`. `dtype`: data type of the parameters. `frozen`: parameters that
        are not trained. `lora`: adapters to train instead; None without adapters."""
        self.table = table
        self.dtype = dtype
        self.frozen = frozen
        self.lora = lora
        self._rows: dict[Stage, list[Row]] = {"first": [], "layer": [], "last": [], "mtp": []}
        for row in sorted(table.rows, key=_order):
            self._rows[row.stage].append(row)
        self._kinds: dict[tuple[Stage, int], tuple[tuple[int, ...], tuple[Row, ...]]] = {}
        """For each layer, by (stage, layer): a key that is the same for all layers with the same rows of the weight
        table, and these rows."""
        self._shapes: dict[tuple[int, int], tuple[int, int]] = {}
        self._runs: dict[tuple[object, ...], tuple[ParameterRun, ...]] = {}

    def runs(self, sizes: Sizes, rank: int) -> list[ParameterRun]:
        """Returns the parameters of the trainer rank `rank`, in the order in which its modules register them."""
        runs: list[ParameterRun] = []
        for block in self._blocks(sizes, rank):
            runs += block
        return runs

    def elements(self, sizes: Sizes, rank: int) -> int:
        """Returns the number of trained parameter elements on the trainer rank `rank`, without alignment gaps."""
        by_block: dict[int, int] = {}  # layers of the same kind share the object
        total = 0
        for block in self._blocks(sizes, rank):
            if id(block) not in by_block:
                by_block[id(block)] = sum(run.elements * run.count for run in block if run.trained)
            total += by_block[id(block)]
        return total

    def unlike_stages(self, sizes: Sizes) -> list[int]:
        """Returns the pipeline stages whose sequence of layer kinds differs from that of all earlier stages. Among
        stages with the same sequence, the first has the most micro-batches in flight."""
        stages: dict[tuple[int, ...], int] = {}
        for stage in range(sizes.pipeline):
            kinds = tuple(map(id, self._blocks(sizes, stage * sizes.stage)))  # layers of the same kind share it
            stages.setdefault(kinds, stage)
        return list(stages.values())

    def _blocks(self, sizes: Sizes, rank: int) -> list[tuple[ParameterRun, ...]]:
        table = self.table
        place = coordinates(rank, sizes)
        counts = sizes.split or (table.layers // sizes.stages,) * sizes.stages
        out: list[tuple[ParameterRun, ...]] = []
        for chunk in range(sizes.virtual):
            stage = chunk * sizes.pipeline + place.pipeline
            first = sum(counts[:stage])
            layer_runs = partial(self._layer_runs, chunk=chunk, sizes=sizes, expert=place.expert)
            tower: tuple[ParameterRun, ...] = ()
            if stage == 0:
                first_rows = layer_runs("first", 0)
                tower = tuple(run for run in first_rows if not run.name.startswith("embedding."))
                out.append(tuple(run for run in first_rows if run.name.startswith("embedding.")))
            out += [layer_runs("layer", layer) for layer in range(first, first + counts[stage])]
            if stage == sizes.stages - 1:
                # megatron-core's order: the decoder's last norm, multi-token-prediction layers, the output layer.
                last = layer_runs("last", 0)
                if stage > 0:
                    last += self._copies(chunk, sizes)
                embedding, norm, output = _split_last(last)
                mtp = [layer_runs("mtp", layer) for layer in range(table.layers, table.layers + table.mtp_layers)]
                out += [embedding, norm, *mtp, output]
            out.append(tower)  # a vision tower is added to the complete chunk
        return out

    def _layer_runs(self, stage: Stage, layer: int, chunk: int, sizes: Sizes, expert: int) -> tuple[ParameterRun, ...]:
        """Returns the parameters of the layer `layer` of `stage` on expert-parallel rank `expert`. `chunk`: index of
        the model chunk that contains the layer."""
        if (stage, layer) not in self._kinds:
            present: list[Row] = []
            for row in self._rows[stage]:
                if row.layers is None or layer in row.layers:
                    present.append(row)
            self._kinds[stage, layer] = tuple(map(id, present)), tuple(present)
        kind, rows = self._kinds[stage, layer]
        frozen_key = (layer, expert) if self.frozen else ()  # relevant only with frozen parameters
        key = kind, chunk, sizes.tensor, sizes.expert_tensor, sizes.expert, sizes.pipeline > 1, frozen_key
        if key not in self._runs:
            runs: list[ParameterRun] = []
            for row in rows:
                runs += self._row_runs(row, layer, chunk, sizes, expert)
            self._runs[key] = tuple(runs)
        return self._runs[key]

    def _copies(self, chunk: int, sizes: Sizes) -> tuple[ParameterRun, ...]:
        """Returns the last stage's copies of first-stage parameters, such as tied embeddings."""
        runs: list[ParameterRun] = []
        for row in self.table.rows:
            for stage, name in row.copies:
                if stage != "last":
                    continue
                for run in self._row_runs(row, 0, chunk, sizes, 0):
                    runs.append(replace(run, name=name))
        return tuple(runs)

    def _row_runs(self, row: Row, layer: int, chunk: int, sizes: Sizes, expert: int) -> Iterator[ParameterRun]:
        parameter = not row.name.endswith(_BUFFER)
        rows, cols = self._shape(row, sizes)
        dtype = row.dtype or self.dtype
        is_expert = row.per_expert and sizes.expert > 1
        rank = 0
        if self.lora is not None and adapts(self.lora.targets, row.name):
            rank = self.lora.rank
        for frozen, count in self._counts(row, layer, sizes, expert):
            yield ParameterRun(
                name=row.name,
                chunk=chunk,
                elements=rows * cols,
                count=count,
                dtype=dtype,
                expert=is_expert,
                tied=bool(row.copies) and sizes.pipeline > 1,
                trained=parameter and not frozen,
                parameter=parameter,
                quantized=row.quantized,
                adapted=rank > 0,
                orthogonalized=_orthogonalized(row),
            )
            if rank == 0:
                continue
            for _ in range(count):  # the adapter matrices A and B
                for name, elements in (("lora_a", rank * cols), ("lora_b", rows * rank)):
                    yield ParameterRun(
                        name=f"{row.name}.{name}",
                        chunk=chunk,
                        elements=elements,
                        count=1,
                        dtype=dtype,
                        expert=is_expert,
                    )

    def _shape(self, row: Row, sizes: Sizes) -> tuple[int, int]:
        """Returns the shape (rows, columns) of a rank's shard of the parameter that the table row `row` describes."""
        size = 1
        if row.axis is not None:
            size = sizes.expert_tensor if row.per_expert else sizes.tensor
        if (id(row), size) not in self._shapes:
            self._shapes[id(row), size], _ = row.map.local([matrix(s) for _, s in row.sources], row.axis, 0, size)
        return self._shapes[id(row), size]

    def _counts(self, row: Row, layer: int, sizes: Sizes, expert: int) -> list[tuple[bool, int]]:
        """Returns pairs (frozen, count): the experts of rank `expert` in order, divided into groups of `count`
        consecutive experts that are all frozen or all trained."""
        if not row.per_expert:
            indices = range(1)
        else:
            experts = max(1, self.table.experts // sizes.expert)
            indices = range(expert * experts, (expert + 1) * experts)
        if not self.frozen:
            return [(False, len(indices))]
        frozen = [row.names(layer, index) in self.frozen for index in indices]
        return [(value, len(list(group))) for value, group in groupby(frozen)]


def _split_last(
    runs: tuple[ParameterRun, ...],
) -> tuple[tuple[ParameterRun, ...], tuple[ParameterRun, ...], tuple[ParameterRun, ...]]:
    """Splits the parameters of the last stage into three parts: the copies of the embedding, the last norm, and the
    output layer."""
    embedding: list[ParameterRun] = []
    norm: list[ParameterRun] = []
    output: list[ParameterRun] = []
    for run in runs:
        if run.name.startswith("embedding."):
            embedding.append(run)
        elif run.name.startswith("output_layer."):
            output.append(run)
        else:
            norm.append(run)
    return tuple(embedding), tuple(norm), tuple(output)


def _orthogonalized(row: Row) -> bool:
    return all(len(shape) == 2 for _, shape in row.sources) and not row.name.startswith(_ENDS)


def _order(row: Row) -> int:
    name = row.name.split("{layer}.", 1)[-1].removeprefix("mtp_model_layer.").removeprefix("decoder.")
    for position, prefix in enumerate(_ORDER):
        if name.startswith(prefix):
            return position
    return len(_ORDER)
