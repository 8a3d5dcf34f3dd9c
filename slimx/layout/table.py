"""A family's weight table: one row per kind of local tensor, and the checkpoint tensors that it holds.

Rows are data. `Table.entries` writes one entry per tensor of the whole model; `MegatronLayout` and `EngineLayout` say
which ranks hold which part of it. Both directions of every conversion are read from there."""

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
"""Most tensors of experts in a table, with which a plan takes 10 s; Qwen3.5-397B-A17B has 61,000, Kimi-K2 46,000."""


@dataclass(frozen=True, slots=True)
class Row:
    """Local name, the checkpoint tensors that it holds, the map between them, the split axis and the owning stage.

    Names may hold `{layer}` (layer number) and `{expert}` (expert number). A name without `{expert}` over sources with
    it is one tensor [experts, rows, cols] that stacks what the map makes of each expert.
    """

    name: str
    sources: Sources
    """Checkpoint names with their full shapes. One that the checkpoint keeps in a stack of all experts ends in
    `[{expert}]`, and in `.T` if it is transposed there (`slimx.layout.table`); its shape is the one before that."""
    map: IndexMap = Copy()
    axis: int | None = None
    """Axis split over the ranks of `group`; None: each of them holds the whole."""
    stage: Stage = "layer"
    group: Group | None = None
    """Ranks of an engine that share the tensor (experts: those of their expert-parallel group); None: all of a
    stage's. "undivided": all too, but under DP-attention each holds the whole. A trainer has one group for experts and
    one for the rest."""
    layers: Collection[int] | None = None
    """Layers that have it; None: all."""
    dtype: str | None = None
    """Its dtype where that is not the model's."""
    quantised: bool = False
    """True if the family's fp8 checkpoints hold it in fp8 with block scales."""
    copies: tuple[tuple[Stage, str], ...] = ()
    """(stage, local name) of ranks that hold the same tensor once more, such as a tied output layer."""
    sections: tuple[str, ...] = ()
    """Endings of the keys under which Megatron-LM's checkpoints keep the sections of the tensor apart, whose map is
    `Sections`; empty: it is one tensor there."""
    appended: tuple[Sources, ...] = ()
    """Sources of further matrices at the end of a stack, on every rank of it (shared experts fused with the others)."""

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.name or self.stacked

    @property
    def stacked(self) -> bool:
        return "{expert}" not in self.name and any("{expert}" in name for name, _ in self.sources)

    def names(self, layer: int, expert: int) -> tuple[str, ...]:
        """Names of the sources with both numbers filled in."""
        numbers = str(layer), str(expert)
        return tuple([name.replace("{layer}", numbers[0]).replace("{expert}", numbers[1]) for name, _ in self.sources])


class Entry(NamedTuple):
    """One tensor of the model: a row with its layer (as the checkpoint counts) and expert filled in."""

    row: Row
    layer: int
    expert: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a model with its number of layers and experts. Construction proves that every row can be inverted."""

    rows: tuple[Row, ...]
    layers: int
    experts: int
    mtp_layers: int = 0
    """Layers of multi-token prediction; the checkpoint numbers them after the others."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint tensor -> the one whose bytes it repeats. A checkpoint may leave it out."""
    frozen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Checkpoint tensors that the trainer does not hold: exports carry their bytes over. A checkpoint may leave them
    out."""
    _entries: list[Entry] = field(default_factory=list, init=False, repr=False, compare=False)
    _sources: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Shapes of the checkpoint's tensors. These three fields are filled once: a plan goes through them again and
    again."""

    def __post_init__(self) -> None:
        self._check_numbers()
        for row in self.rows:
            check_row(row, self.experts)

    def _check_numbers(self) -> None:
        """Raises ValueError for sizes that are no whole numbers, or more than any model has: a config.json may say
        anything, and entries are counted one by one."""
        counts = (self.layers, self.experts, self.mtp_layers)
        numbers = list(zip(("layers", "experts", "layers of multi-token prediction"), counts, (0, 0, 0), strict=True))
        numbers += [(f"the shape of {name}", size, 1) for row in self.rows for name, of in row.sources for size in of]
        for what, number, least in numbers:
            if not isinstance(number, int) or number < least:
                raise ValueError(f"{what} would be {number!r}")
        of_experts = sum(row.per_expert and not row.stacked for row in self.rows)
        if (matrices := self.layers * self.experts * of_experts) > _MOST_MATRICES:
            raise ValueError(f"{self.layers} layers of {self.experts} experts would be {matrices} tensors")

    def entries(self) -> Sequence[Entry]:
        """Every tensor of the whole model, in the order of the checkpoint: stage by stage, layer by layer."""
        if not self._entries:
            last = self.layers + self.mtp_layers
            for stage, numbers in (("first", (0,)), ("layer", range(self.layers)), ("last", (0,))):
                self._entries.extend(self._of(stage, numbers))
            self._entries.extend(self._of("mtp", range(self.layers, last)))
        return self._entries

    def _of(self, stage: Stage, numbers: range | tuple[int, ...]) -> Iterator[Entry]:
        rows = [row for row in self.rows if row.stage == stage]
        for layer in numbers:
            for row in rows:
                if row.layers is None or layer in row.layers:
                    for expert in range(self.experts if row.per_expert and not row.stacked else 1):
                        yield Entry(row, layer, expert, row.names(layer, expert))

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor of the checkpoint that the rows hold, in order, stacks as a whole."""
        if not self._shapes:
            out: dict[str, tuple[int, ...]] = {}
            for source, shape in self.sources().items():
                place = stored(source)
                out[place.name] = place.shape(shape, self.experts)
            for name, original in self.aliases.items():
                if name in out or original not in out:
                    raise SlimxError(
                        f"weight table: {name} cannot repeat {original}; the original must be in the table",
                        code="table.alias",
                        about=name,
                    )
            self._shapes.update(out)
        return MappingProxyType(self._shapes)

    def turned(self) -> frozenset[str]:
        """Stacks of the checkpoint that hold their matrices transposed."""
        kept = {row.name for row in self.rows if any(name.endswith(".T") for name, _ in row.sources)}
        places = (stored(name) for entry in self.entries() if entry.row.name in kept for name in entry.sources)
        return frozenset(place.name for place in places if place.turned)

    def sources(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of everything that the rows are made of, in order. Two rows must not claim the same."""
        if not self._sources:
            out: dict[str, tuple[int, ...]] = {}
            owner: dict[str, Row] = {}
            for entry in self.entries():
                for name, (_, shape) in zip(entry.sources, entry.row.sources, strict=True):
                    if owner.setdefault(name, entry.row) is not entry.row:
                        raise SlimxError(
                            f"weight table: {name} belongs to two rows; each checkpoint tensor has one place",
                            code="table.two_rows",
                            about=name,
                        )
                    out[name] = shape
            self._sources.update(out)
        return MappingProxyType(self._sources)


def padded_vocabulary(name: str, vocab: int, hidden: int, *, stage: Stage, group: Group) -> Row:
    """An embedding or output layer as SGLang's `VocabParallelEmbedding` holds it: padded to a multiple of 64 rows."""
    return Row(name, ((name, (vocab, hidden)),), Pad(64), axis=0, stage=stage, group=group)


def check_row(row: Row, experts: int) -> None:
    """Prove that the row's map is invertible: it fills its local tensor once, padding aside, and uses each checkpoint
    element once."""
    if row.quantised and (row.dtype is not None or any(len(shape) == 1 for _, shape in row.sources)):
        raise SlimxError(
            f"weight table: {row.name} is quantised, so it must hold matrices and have no dtype of its own",
            code="table.quantised",
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
    """The place of a table's source in its checkpoint: a tensor alone, or all experts' in one stack.

    A source may be named `stack[3]` or `stack[3].T`: what stands at 3 of the checkpoint's tensor `stack`, and the same
    transposed. So the rows of a family that stacks its experts look like those of any other. The stack is taken apart
    where a checkpoint is read and put together where one is written. That is also the place for a transposition: the
    kernels write rows, and of a matrix that is interleaved and transposed no two neighbours are neighbours anywhere
    else.
    """

    name: str
    """Name of the checkpoint's tensor."""
    index: int | None = None
    """Place in the stack; None: the tensor is the source itself."""
    turned: bool = False
    """True if the stack holds it transposed."""

    def shape(self, source: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor for a source of shape `source`, of which a stack holds `count`."""
        if self.index is None:
            return tuple(source)
        return (count, *(reversed(source) if self.turned else source))


def stored(source: str) -> Stored:
    """The place of the source named `source` in a table."""
    match = _INDEXED.fullmatch(source) if "[" in source else None
    if match is None:
        return Stored(source)
    return Stored(match["name"], int(match["index"]), match["turned"] is not None)


def checkpoint_parts(table: Table, *, mtp: bool = True, served: Table | None = None) -> Iterator[Part]:
    """The checkpoint itself as a target of one rank: every tensor whole, under its Hugging Face name.

    A stack comes as its matrices one below the other, those that it holds transposed not yet so: `Table.checkpoint` has
    its own shape. `mtp`: with the layers of multi-token prediction, which only a draft model loads. `served`: the table
    of an engine that takes them, which may hold one in a dtype of its own (a router's weight in fp32), or never in
    fp8."""
    kept = {name: entry.row for entry in (served.entries() if served else ()) for name in entry.sources}
    dtypes = {name: row.dtype for name, row in kept.items() if row.dtype}
    for entry in table.entries():
        if entry.row.stage == "mtp" and not mtp:
            continue
        for name, (_, shape) in zip(entry.sources, entry.row.sources, strict=True):
            place, (rows, cols), dtype = stored(name), matrix(shape), dtypes.get(name, entry.row.dtype)
            if place.index is None:
                whole = (Rect(0, 0, 0, rows, cols, 0, 0),)
                quantised = entry.row.quantised and kept.get(name, entry.row).quantised
                yield Part(name, tuple(shape), (0,), (name,), whole, dtype, quantised)
            elif place.index == 0:
                names = tuple(name.replace("[0]", f"[{k}]") for k in range(table.experts))
                rects = tuple(Rect(k, 0, 0, rows, cols, k * rows, 0) for k in range(table.experts))
                yield Part(place.name, (len(names), *shape), (0,), names, rects, dtype, column=len(shape) == 1)
