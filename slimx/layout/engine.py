"""Determines which part of which tensor each rank of an SGLang engine has, in the engine's fused layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slimx.errors import SlimxError
from slimx.layout.maps import Once, Pad, Rect
from slimx.layout.parts import Part, local_shape, matrix
from slimx.layout.ranks import EngineSizes
from slimx.layout.table import Entry, Row, Table

DRAFT = "draft."
"""Prefix that slimx adds to the parameter names of an engine's draft model, the one that proposes tokens in speculative
decoding."""


class Shard(NamedTuple):
    """Shard of the tensors of one kind (a row of the engine's weight table), with the number of these tensors. Used to
    estimate memory without listing every tensor."""

    row: Row
    shape: tuple[int, ...]
    ranks: Sequence[int]
    """Tensor-parallel ranks that store this shard, in each pipeline stage."""
    layers: tuple[int, ...]
    """Number of tensors with this shard in each pipeline stage: one per layer, or one per layer and expert if the row's
    name contains an expert index."""


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Distribution of a model's tensors, as listed in its family's engine weight table, over the ranks of one engine.
    Raises SlimxError for sizes that do not fit the model."""

    table: Table
    sizes: EngineSizes

    def __post_init__(self) -> None:
        sizes = self.sizes
        table = self.table
        physical = table.experts + sizes.redundant
        if sizes.pipeline > table.layers:
            fault = "layers", "pipeline", sizes.pipeline, f"is more than the model's {table.layers} layers; lower it"
        elif not table.experts and (sizes.expert > 1 or sizes.redundant):
            problem = f"and sglang.ep_num_redundant_experts={sizes.redundant} need a model with experts; set 1 and 0"
            fault = "no_experts", "expert", sizes.expert, problem
        elif sizes.attention_data > 1 and not any(row.group == "attention" for row in table.rows):
            problem = "is not possible, because SGLang 0.5.23 does not support DP-attention for this model; set 1"
            fault = "dp_attention", "dp_attention", sizes.attention_data, problem
        elif physical % sizes.expert:
            problem = (
                f"does not divide an engine's {physical} physical experts ({table.experts} of the model, "
                f"{sizes.redundant} redundant); choose a divisor of that sum"
            )
            fault = "experts", "expert", sizes.expert, problem
        else:
            return
        code, name, value, problem = fault
        about = f"{sizes.key}.{name}"
        raise SlimxError(f"{about}={value} {problem}", code=f"engine_layout.{code}", about=about)

    def parts(self) -> Iterator[Part]:
        """Yields every distinct local tensor of the engine, with the ranks that store it."""
        stage_of = self._stage_of()
        geometry: dict[tuple[int, int], tuple[tuple[int, ...], tuple[Rect, ...]]] = {}
        for entry in self.table.entries():
            row = entry.row
            stage = self._home(row, entry.layer, stage_of)
            for shard, size, owner, ranks in self._shards(row):
                key = id(row), shard  # expert-parallel ranks have equal shapes and rectangles, of different experts
                if key not in geometry:
                    geometry[key] = self._geometry(row, shard, size)
                shape, rects = geometry[key]
                yield Part(
                    row.name.format(layer=entry.layer),
                    shape,
                    tuple(stage * self.sizes.tensor + rank for rank in ranks),
                    self._sources(entry, owner),
                    rects,
                    row.dtype,
                    row.quantized,
                    column=row.stacked and len(shape) == 2,
                    padded=isinstance(row.map, Pad | Once),
                )

    def shards(self) -> Iterator[Shard]:
        """Yields every shard of every table row once, with the number of tensors that contain it; `parts` yields these
        tensors one by one."""
        table = self.table
        stage_of = self._stage_of()
        for row in table.rows:
            counts = Counter(self._home(row, layer, stage_of) for layer in table.layers_of(row))
            per_layer = table.experts if row.per_expert and not row.stacked else 1
            layers = tuple(counts[stage] * per_layer for stage in range(self.sizes.pipeline))
            shapes: dict[int, tuple[int, ...]] = {}
            for shard, size, _, ranks in self._shards(row):
                if shard not in shapes:
                    shapes[shard] = self._geometry(row, shard, size)[0]
                yield Shard(row, shapes[shard], ranks, layers)

    def _stage_of(self) -> list[int]:
        """Returns the index of the pipeline stage of every layer. If the number of layers is not divisible by the
        number of stages, the last stages have one more layer each, as in SGLang."""
        base, remainder = divmod(self.table.layers, self.sizes.pipeline)
        stage_of: list[int] = []
        for stage in range(self.sizes.pipeline):
            has_extra = stage >= self.sizes.pipeline - remainder
            stage_of += [stage] * (base + 1 if has_extra else base)
        return stage_of

    def _home(self, row: Row, layer: int, stage_of: list[int]) -> int:
        last = self.sizes.pipeline - 1
        return {"first": 0, "last": last, "mtp": last}.get(row.stage, stage_of[layer % self.table.layers])

    def _shards(self, row: Row) -> Iterator[tuple[int, int, int, Sequence[int]]]:
        """Yields every shard of the table row `row` as (index of the shard, number of shards, expert-parallel rank,
        tensor-parallel ranks that store the shard). The expert-parallel rank is 0 for rows without experts."""
        ranks = range(self.sizes.tensor)
        if row.stacked:
            size = self.sizes.expert_tensor
            for owner in range(self.sizes.expert):
                for shard in range(size):
                    yield shard, size, owner, [owner * size + shard]
            return
        size = self.sizes.attention_tensor if row.group == "attention" else self.sizes.tensor
        if row.axis is None or (row.group == "undivided" and self.sizes.attention_data > 1):
            yield 0, 1, 0, ranks
        else:
            for shard in range(size):
                yield shard, size, 0, ranks[shard::size]

    @property
    def _slots(self) -> int:
        """Number of physical experts on each expert-parallel rank."""
        return (self.table.experts + self.sizes.redundant) // self.sizes.expert

    def _sources(self, entry: Entry, owner: int) -> tuple[str, ...]:
        row = entry.row
        if not row.stacked:
            return entry.sources
        first = owner * self._slots
        names: list[str] = []
        for physical in range(first, first + self._slots):
            names += row.names(entry.layer, physical % self.table.experts)
        for sources in row.appended:
            names += [name.format(layer=entry.layer) for name, _ in sources]
        return tuple(names)

    def _geometry(self, row: Row, shard: int, size: int) -> tuple[tuple[int, ...], tuple[Rect, ...]]:
        slots = [row.sources] * self._slots + list(row.appended) if row.stacked else [row.sources]
        rects: list[Rect] = []
        rows = 0
        source_count = 0
        for sources in slots:
            try:
                shape, inner = row.map.local([matrix(shape) for _, shape in sources], row.axis, shard, size)
            except SlimxError as error:
                keys = f"{self.sizes.key}.tensor"
                if row.stacked:
                    keys += " or expert"
                elif row.group == "attention":
                    keys += " or dp_attention"
                raise SlimxError(
                    f"{keys}: engine tensor {row.name} cannot be split over the ranks, because {error}",
                    code="engine_layout.tensor",
                    about=row.name,
                ) from None
            rects += [r._replace(source=source_count + r.source, local_row=rows + r.local_row) for r in inner]
            rows += shape[0]
            source_count += len(sources)
        if not row.stacked:
            return local_shape(shape, row.sources), tuple(rects)
        if all(len(source_shape) == 1 for _, source_shape in row.sources):
            return (len(slots), rows // len(slots)), tuple(rects)
        return (len(slots), rows // len(slots), shape[1]), tuple(rects)
