"""Weight tables of model families. A table has one row per kind of local tensor, which lists the checkpoint tensors
that the local tensor contains. `Table.entries` expands the rows to one entry per tensor of the whole model;
`MegatronLayout` and `EngineLayout` determine which ranks have which part of each tensor. Loading, export and
publication are all derived from the rows."""

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
"""Maximum number of expert tensors in a table. Compiling a copy plan for that many takes 10 s; Qwen3.5-397B-A17B has
61,000 expert tensors, and Kimi-K2 has 46,000."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a weight table, which describes one kind of local tensor: its name, the checkpoint tensors that it
    contains, the map between them, and how it is split over ranks.

    Names may contain the placeholders `{layer}` and `{expert}`. If the sources' names contain `{expert}` and the local
    name does not, the row describes one tensor [experts, rows, cols] that stacks the mapped experts."""

    name: str
    sources: Sources
    """Names of the checkpoint tensors, with their full shapes.

    If the checkpoint stacks all experts in one tensor, the name ends in `[{expert}]`, or in `[{expert}].T` if the
    stacked matrices are transposed (`Stored`); the shape is that of the untransposed matrix."""
    map: IndexMap = Copy()
    axis: int | None = None
    """Axis that is split over the ranks of `group`; None if each rank has the whole tensor."""
    stage: Stage = "layer"
    group: Group | None = None
    """Ranks of an engine over which the tensor is split. Only for engines; trainers ignore it.

    None: all ranks of a stage; for experts, those of one expert-parallel group. "attention": ranks that share one copy
    of the attention. "undivided": all ranks of a stage; with DP-attention, the tensor is not split, and each rank
    stores all of it."""
    layers: Collection[int] | None = None
    """Indices of the layers that have this tensor; None if all have it."""
    dtype: str | None = None
    """Dtype of the tensor if it differs from the model's dtype, else None."""
    quantized: bool = False
    """True if the family's fp8 checkpoints store the tensor in fp8 with block scales."""
    copies: tuple[tuple[Stage, str], ...] = ()
    """Pairs (stage, local name), one for each pipeline stage that stores a second copy of the tensor, such as a tied
    output layer."""
    sections: tuple[str, ...] = ()
    """Suffixes of the keys under which Megatron-LM's checkpoints store the sections of a tensor whose map is
    `Sections`; empty if they store it as one tensor."""
    appended: tuple[Sources, ...] = ()
    """Sources of the matrices that every rank appends to its stack of experts, such as shared experts fused with the
    routed ones."""

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.name or self.stacked

    @property
    def stacked(self) -> bool:
        return "{expert}" not in self.name and any("{expert}" in name for name, _ in self.sources)

    def names(self, layer: int, expert: int) -> tuple[str, ...]:
        """Returns the names of the sources for the layer and expert with these indices."""
        layer_index = str(layer)
        expert_index = str(expert)
        # A list is faster than a generator, which matters because plans call this for every tensor.
        return tuple(
            [name.replace("{layer}", layer_index).replace("{expert}", expert_index) for name, _ in self.sources]
        )


class Entry(NamedTuple):
    """One tensor of the whole model: a table row with the indices of a layer and an expert. Layers are numbered as in
    the checkpoint."""

    row: Row
    layer: int
    expert: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Weight table of a model: rows that describe the model's tensors, and the numbers of layers and experts. Creating
    a table checks that the map of every row is invertible, that is, uses each source element exactly once."""

    rows: tuple[Row, ...]
    layers: int
    experts: int
    mtp_layers: int = 0
    """Number of multi-token prediction layers, which the checkpoint numbers after the decoder layers."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint tensor that repeats the bytes of another one (tied weights) -> that other tensor. A checkpoint may
    omit the repeated tensor."""
    frozen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape of checkpoint tensors that the trainer does not store; exports copy their bytes from the
    checkpoint. A checkpoint may omit these tensors."""
    _entries: list[Entry] = field(default_factory=list, init=False, repr=False, compare=False)
    _sources: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Checkpoint tensor -> shape. This field, `_entries` and `_sources` cache results that compiling a plan needs
    repeatedly."""

    def __post_init__(self) -> None:
        self._check_numbers()
        for row in self.rows:
            check_row(row, self.experts)

    def _check_numbers(self) -> None:
        """Raises ValueError for sizes that are not integers, or that are larger than in any model.

        A config.json may contain any values, and expanding an excessive number of entries would take too long."""
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
            raise ValueError(
                f"{self.layers} layers with {self.experts} experts would be {matrices} tensors, more than the limit of "
                f"{_MOST_MATRICES}"
            )

    def entries(self) -> Sequence[Entry]:
        """Returns every tensor of the whole model in checkpoint order: stage by stage, layer by layer."""
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
        """Returns the indices of the layers to which `row` applies, as in `Entry.layer`; [0] for a row that belongs to
        no layer."""
        return [layer for layer in self._layers_of(row.stage) if row.layers is None or layer in row.layers]

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns name -> shape of every checkpoint tensor that the rows use, in order. A stack of experts counts as
        one tensor."""
        if not self._shapes:
            out: dict[str, tuple[int, ...]] = {}
            for source, shape in self.sources().items():
                tensor = stored(source)
                out[tensor.name] = tensor.shape(shape, self.experts)
            for name, original in self.aliases.items():
                if name in out or original not in out:
                    fault = "a row uses the alias as" if name in out else "no row has the original as"
                    raise SlimxError(
                        f"weight table: {name} is an alias of {original}, but {fault} a source; correct the rows or "
                        "remove the alias",
                        code="table.alias",
                        about=name,
                    )
            self._shapes.update(out)
        return MappingProxyType(self._shapes)

    def transposed(self) -> frozenset[str]:
        """Returns the names of the checkpoint tensors that are stacks of transposed matrices."""
        transposed: set[str] = set()
        for entry in self.entries():
            # The row's names are checked first, because `stored` is slow and most rows have no stacks.
            if any(name.endswith(".T") for name, _ in entry.row.sources):
                tensors = [stored(source) for source in entry.sources]
                transposed.update(tensor.name for tensor in tensors if tensor.transposed)
        return frozenset(transposed)

    def sources(self) -> Mapping[str, tuple[int, ...]]:
        """Returns name -> shape for all checkpoint tensors that the rows use, in order; each matrix in a stack counts
        as a separate tensor. Raises SlimxError if two rows use the same source."""
        if not self._sources:
            out: dict[str, tuple[int, ...]] = {}
            owner: dict[str, Row] = {}
            for entry in self.entries():
                for name, (_, shape) in zip(entry.sources, entry.row.sources, strict=True):
                    if owner.setdefault(name, entry.row) is not entry.row:
                        raise SlimxError(
                            f"weight table: the rows {owner[name].name} and {entry.row.name} have the same source "
                            f"{name}; remove it from one of them",
                            code="table.two_rows",
                            about=name,
                        )
                    out[name] = shape
            self._sources.update(out)
        return MappingProxyType(self._sources)


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} would be {value!r}, but must be an integer of at least {least}")


def padded_vocabulary(name: str, vocab: int, hidden: int, *, stage: Stage, group: Group) -> Row:
    """Returns the table row that describes the tensor of an embedding or output layer in SGLang's
    `VocabParallelEmbedding`, which pads the vocabulary to a multiple of 64."""
    return Row(name, ((name, (vocab, hidden)),), Pad(64), axis=0, stage=stage, group=group)


def check_row(row: Row, experts: int) -> None:
    """Raises SlimxError unless the row's map is invertible, that is, fills the local tensor except for padding and uses
    each checkpoint element exactly once."""
    if row.quantized and (row.dtype is not None or any(len(shape) == 1 for _, shape in row.sources)):
        fault = "has a vector as a source" if row.dtype is None else "sets a dtype"
        raise SlimxError(
            f"weight table: {row.name} is quantized, but {fault}; set quantized=False in this row",
            code="table.quantized",
            about=row.name,
        )
    shared = row.per_expert and not any("{expert}" in name for name, _ in row.sources)
    used: list[list[Rect]] = [[] for _ in row.sources]
    shapes = [matrix(shape) for _, shape in row.sources]
    for _ in range(experts if shared else 1):
        shape, rects = row.map.local(shapes, None, 0, 1)
        boxes = np.array([(r.local_row, r.local_col, r.rows, r.cols) for r in rects], dtype=np.int64).reshape(-1, 4)
        check_boxes(f"weight table: {row.name}", shape, boxes, padded=isinstance(row.map, Pad))
        for rect in rects:
            used[rect.source].append(rect)
    for (name, _), shape, rects in zip(row.sources, shapes, used, strict=True):
        check_sources(name, shape, rects)


@dataclass(frozen=True, slots=True)
class Stored:
    """Location of a weight table's source in the checkpoint: a whole tensor, or one item of a stack of all experts.

    A source named `stack[3]` or `stack[3].T` is item 3 of the checkpoint's tensor `stack`, or the transpose of that
    item, so the table rows of a family that stacks its experts look like those of any other family. Stacks are split
    when a checkpoint is read and assembled when it is written, and matrices are transposed at the same time: the
    kernels copy rows, and a matrix that is both interleaved and transposed has no contiguous rows."""

    name: str
    """Name of the tensor in the checkpoint."""
    index: int | None = None
    """Index of the item in the stack; None if the source is the whole tensor."""
    transposed: bool = False
    """True if the stack stores the transpose of the matrix."""

    def shape(self, source: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Returns the shape of the checkpoint's tensor for a source of shape `source`. `count`: number of items in a
        stack."""
        if self.index is None:
            return tuple(source)
        matrix_shape = reversed(source) if self.transposed else source
        return (count, *matrix_shape)


def stored(source: str) -> Stored:
    """Parses `source`, the name of a weight table's source, such as `stack[3].T`, and returns the source's location in
    the checkpoint."""
    match = _INDEXED.fullmatch(source) if "[" in source else None
    if match is None:
        return Stored(source)
    return Stored(match["name"], int(match["index"]), match["turned"] is not None)


def checkpoint_parts(table: Table, *, mtp: bool = True, served: Table | None = None) -> Iterator[Part]:
    """Yields the layout of a checkpoint, as if a single rank stored all tensors in full under their Hugging Face names.

    A stack is a vertical concatenation of its matrices, which are not transposed back. `mtp`: True to include the
    multi-token prediction layers, which only a draft model loads. `served`: table of the engine that loads the tensors;
    it may set another dtype for a tensor, such as fp32 for a router's weight, or exclude it from quantization."""
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
