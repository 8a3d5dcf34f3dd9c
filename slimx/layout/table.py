"""A family's weight table: one row per kind of local tensor, with the checkpoint tensors that it holds.

Rows are data. `Table.entries` expands them to one entry per tensor of the whole model; `MegatronLayout` and
`EngineLayout` determine which ranks hold which part of it. Both directions of every conversion are derived from them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from slimx.errors import SlimxError
from slimx.layout.maps import Copy, IndexMap, Pad, Rect
from slimx.layout.parts import Part, check_boxes, check_sources, matrix

_INDEXED = re.compile(r"(?P<name>[^\[\]]+)\[(?P<index>\d+)\](?P<turned>\.T)?")

Stage = Literal["first", "layer", "last", "mtp"]
Group = Literal["tensor", "attention", "undivided"]
Sources = tuple[tuple[str, tuple[int, ...]], ...]
_MOST_MATRICES = 100_000
"""Maximum number of expert tensors in a table, with which a plan takes 10 s; Qwen3.5-397B-A17B has 61,000, Kimi-K2
46,000."""


@dataclass(frozen=True, slots=True)
class Row:
    """Local name, checkpoint tensors, the map between them, split axis and stage.

    Names may contain `{layer}` and `{expert}` (indices). A name without `{expert}` over sources with it is one tensor
    [experts, rows, cols] that stacks the mapped experts."""

    name: str
    sources: Sources
    """Checkpoint names with their full shapes. A source in a stack of all experts ends in `[{expert}]`, and in `.T` if
    it is transposed there (`slimx.layout.table`); its shape is that of the untransposed matrix."""
    map: IndexMap = Copy()
    axis: int | None = None
    """Axis split over the ranks of `group`; None: each rank holds the whole tensor."""
    stage: Stage = "layer"
    group: Group | None = None
    """Ranks of an engine that share the tensor (experts: those of their expert-parallel group); None: all of a stage.
    "undivided": all as well, but under DP-attention each holds the whole tensor. A trainer has one group for experts
    and one for the rest."""
    layers: Collection[int] | None = None
    """Layers that have it; None: all."""
    dtype: str | None = None
    """Its dtype if it is not the model's."""
    quantized: bool = False
    """True if the family's fp8 checkpoints hold it in fp8 with block scales."""
    copies: tuple[tuple[Stage, str], ...] = ()
    """(stage, local name) of ranks that hold a second copy of the tensor, such as a tied output layer."""
    sections: tuple[str, ...] = ()
    """Suffixes of the keys under which Megatron-LM's checkpoints store the sections of the tensor, whose map is
    `Sections`; empty: they store it as one tensor."""
    appended: tuple[Sources, ...] = ()
    """Sources of further matrices at the end of a stack, on every rank (shared experts fused with the others)."""

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.name or self.stacked

    @property
    def stacked(self) -> bool:
        return "{expert}" not in self.name and any("{expert}" in name for name, _ in self.sources)

    def names(self, layer: int, expert: int) -> tuple[str, ...]:
        """Returns the names of the sources for a layer and expert."""
        layer_index = str(layer)
        expert_index = str(expert)
        # A list is faster than a generator, and plans call this for every tensor.
        return tuple(
            [name.replace("{layer}", layer_index).replace("{expert}", expert_index) for name, _ in self.sources]
        )


class Entry(NamedTuple):
    """One tensor of the model: a row with layer (as the checkpoint counts) and expert."""

    row: Row
    layer: int
    expert: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a model with its number of layers and experts. Construction proves that every row is invertible."""

    rows: tuple[Row, ...]
    layers: int
    experts: int
    mtp_layers: int = 0
    """Layers of multi-token prediction; the checkpoint numbers them after the others."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint tensor -> the one whose bytes it repeats. A checkpoint may omit it."""
    frozen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Checkpoint tensors that the trainer does not hold: exports copy their bytes. A checkpoint may omit them."""
    _entries: list[Entry] = field(default_factory=list, init=False, repr=False, compare=False)
    _sources: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Shapes of the checkpoint's tensors. These three fields are caches, because a plan reads them repeatedly."""

    def __post_init__(self) -> None:
        self._check_numbers()
        for row in self.rows:
            check_row(row, self.experts)

    def _check_numbers(self) -> None:
        """Raises ValueError for sizes that are not whole numbers or exceed those of any model: a config.json may have
        any values, and entries are enumerated one by one."""
        _check_integer("layers", self.layers, 0)
        _check_integer("experts", self.experts, 0)
        _check_integer("layers of multi-token prediction", self.mtp_layers, 0)
        for row in self.rows:
            for name, shape in row.sources:
                for size in shape:
                    _check_integer(f"the shape of {name}", size, 1)
        expert_rows = [row for row in self.rows if row.per_expert and not row.stacked]
        matrices = self.layers * self.experts * len(expert_rows)
        if matrices > _MOST_MATRICES:
            raise ValueError(f"{self.layers} layers of {self.experts} experts would be {matrices} tensors")

    def entries(self) -> Sequence[Entry]:
        """Returns every tensor of the whole model, in the order of the checkpoint: stage by stage, layer by layer."""
        if not self._entries:
            stages: tuple[Stage, ...] = ("first", "layer", "last", "mtp")
            for stage in stages:
                self._entries.extend(self._entries_of(stage))
        return self._entries

    def _entries_of(self, stage: Stage) -> Iterator[Entry]:
        rows = [row for row in self.rows if row.stage == stage]
        for layer in self._layers_of(stage):
            for row in rows:
                if row.layers is None or layer in row.layers:
                    for expert in range(self.experts if row.per_expert and not row.stacked else 1):
                        yield Entry(row, layer, expert, row.names(layer, expert))

    def _layers_of(self, stage: Stage) -> range:
        if stage == "layer":
            return range(self.layers)
        if stage == "mtp":
            return range(self.layers, self.layers + self.mtp_layers)
        return range(1)

    def layers_of(self, row: Row) -> list[int]:
        """Returns the layers that have `row`, as `Entry.layer`; 0 for a row outside the layers."""
        return [layer for layer in self._layers_of(row.stage) if row.layers is None or layer in row.layers]

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns name and shape of every checkpoint tensor that the rows hold, in order, with stacks as one tensor."""
        if not self._shapes:
            out: dict[str, tuple[int, ...]] = {}
            for source, shape in self.sources().items():
                tensor = stored(source)
                out[tensor.name] = tensor.shape(shape, self.experts)
            for name, original in self.aliases.items():
                if name in out or original not in out:
                    raise SlimxError(
                        f"weight table: {name} cannot repeat {original}; the original must be in the table",
                        code="table.alias",
                        about=name,
                    )
            self._shapes.update(out)
        return MappingProxyType(self._shapes)

    def transposed(self) -> frozenset[str]:
        """Returns the checkpoint's stacks of transposed matrices."""
        transposed: set[str] = set()
        for entry in self.entries():
            # Checked first by row: `stored` is slow, and most rows have no stacks.
            if any(name.endswith(".T") for name, _ in entry.row.sources):
                tensors = [stored(source) for source in entry.sources]
                transposed.update(tensor.name for tensor in tensors if tensor.transposed)
        return frozenset(transposed)

    def sources(self) -> Mapping[str, tuple[int, ...]]:
        """Returns name and shape of all sources of the rows, in order. Raises SlimxError if two rows share one."""
        if not self._sources:
            out: dict[str, tuple[int, ...]] = {}
            owner: dict[str, Row] = {}
            for entry in self.entries():
                for name, (_, shape) in zip(entry.sources, entry.row.sources, strict=True):
                    if owner.setdefault(name, entry.row) is not entry.row:
                        raise SlimxError(
                            f"weight table: {name} belongs to two rows; each checkpoint tensor must have one row",
                            code="table.two_rows",
                            about=name,
                        )
                    out[name] = shape
            self._sources.update(out)
        return MappingProxyType(self._sources)


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} would be {value!r}")


def padded_vocabulary(name: str, vocab: int, hidden: int, *, stage: Stage, group: Group) -> Row:
    """Returns the row of an embedding or output layer as SGLang's `VocabParallelEmbedding` holds it: padded to a
    multiple of 64 rows."""
    return Row(name, ((name, (vocab, hidden)),), Pad(64), axis=0, stage=stage, group=group)


def check_row(row: Row, experts: int) -> None:
    """Proves that the row's map is invertible: it fills its local tensor once, padding aside, and uses each checkpoint
    element once."""
    if row.quantized and (row.dtype is not None or any(len(shape) == 1 for _, shape in row.sources)):
        raise SlimxError(
            f"weight table: {row.name} is quantized, so it must hold matrices and set no dtype",
            code="table.quantized",
            about=row.name,
        )
    shared = row.per_expert and not any("{expert}" in name for name, _ in row.sources)
    used: list[list[Rect]] = [[] for _ in row.sources]
    shapes = [matrix(shape) for _, shape in row.sources]
    for _ in range(experts if shared else 1):
        shape, rects = row.map.local(shapes, None, 0, 1)
        filled = max((r.local_row + r.rows for r in rects), default=0) if isinstance(row.map, Pad) else shape[0]
        boxes = np.array([(r.local_row, r.local_col, r.rows, r.cols) for r in rects], dtype=np.int64).reshape(-1, 4)
        check_boxes(f"weight table: {row.name}", (filled, shape[1]), boxes)
        for rect in rects:
            used[rect.source].append(rect)
    for (name, _), shape, rects in zip(row.sources, shapes, used, strict=True):
        check_sources(name, shape, rects)


@dataclass(frozen=True, slots=True)
class Stored:
    """Location of a table's source in its checkpoint: as a tensor, or in a stack of all experts.

    A source named `stack[3]` or `stack[3].T` is item 3 of the checkpoint's tensor `stack`, or its transpose, so the
    rows of a family that stacks its experts look like those of any other. Stacks are split when a checkpoint is read
    and assembled when one is written. Matrices are also transposed there: the kernels copy rows, and a matrix that is
    interleaved and transposed has no contiguous rows."""

    name: str
    """Name of the checkpoint's tensor."""
    index: int | None = None
    """Index in the stack; None: the tensor is the source itself."""
    transposed: bool = False
    """True if the stack holds it transposed."""

    def shape(self, source: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Returns the shape of the checkpoint's tensor for a source of shape `source`; a stack has `count` items."""
        if self.index is None:
            return tuple(source)
        matrix_shape = reversed(source) if self.transposed else source
        return (count, *matrix_shape)


def stored(source: str) -> Stored:
    """Returns where the source named `source` of a table is stored."""
    match = _INDEXED.fullmatch(source) if "[" in source else None
    if match is None:
        return Stored(source)
    return Stored(match["name"], int(match["index"]), match["turned"] is not None)


def checkpoint_parts(table: Table, *, mtp: bool = True, served: Table | None = None) -> Iterator[Part]:
    """Yields the checkpoint as the target of one rank: every tensor in full, under its Hugging Face name.

    Stacked tensors are vertically concatenated matrices; transposed ones are not transposed back. `mtp`: with the
    layers of multi-token prediction, which only a draft model loads. `served`: the table of an engine that loads them,
    which may have another dtype for a tensor (a router's weight in fp32), or never hold it in fp8."""
    served_rows: dict[str, Row] = {}
    if served is not None:
        for entry in served.entries():
            served_rows.update(dict.fromkeys(entry.sources, entry.row))
    for entry in table.entries():
        if entry.row.stage == "mtp" and not mtp:
            continue
        for name, (_, shape) in zip(entry.sources, entry.row.sources, strict=True):
            tensor = stored(name)
            rows, cols = matrix(shape)
            served_row = served_rows.get(name, entry.row)
            dtype = served_row.dtype or entry.row.dtype
            if tensor.index is None:
                rect = Rect(0, 0, 0, rows, cols, 0, 0)
                quantized = entry.row.quantized and served_row.quantized
                yield Part(name, tuple(shape), (0,), (name,), (rect,), dtype, quantized)
            elif tensor.index == 0:
                names = tuple(name.replace("[0]", f"[{k}]") for k in range(table.experts))
                rects = tuple(Rect(k, 0, 0, rows, cols, k * rows, 0) for k in range(table.experts))
                yield Part(tensor.name, (len(names), *shape), (0,), names, rects, dtype, column=len(shape) == 1)
