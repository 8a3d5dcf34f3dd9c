"""A family's weight table: one row per kind of Megatron tensor, and what it means on each rank.

Rows are data. `expand` writes one `Entry` per tensor of the whole model; `held_by` says which entries a rank holds,
under which local name, made of which rectangles. Both directions of every conversion are read from there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slimx.errors import SlimxError
from slimx.layout.maps import Copy, IndexMap, Rect, Shape
from slimx.layout.ranks import Coordinates, Sizes

Stage = Literal["first", "last", "layer"]


@dataclass(frozen=True, slots=True)
class Row:
    """Megatron name, the checkpoint tensors that it holds, the map between them, the split axis and the owning stage.

    Names may hold `{layer}` (global layer number) and `{expert}` (global expert number).
    """

    megatron: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    """Checkpoint names with their full shapes."""
    map: IndexMap = Copy()
    axis: int | None = None
    """Axis split over TP (over ETP for experts); None: every rank of the group holds the whole."""
    stage: Stage = "layer"

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the model: a row with its layer and expert filled in."""

    row: Row
    layer: int
    expert: int

    @property
    def sources(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name.format(layer=self.layer, expert=self.expert), shape) for name, shape in self.row.sources]


@dataclass(frozen=True, slots=True)
class Held:
    """One local tensor of one rank."""

    name: str
    """Name in the rank's own Megatron module."""
    shape: Shape
    sources: list[tuple[str, tuple[int, ...]]]
    rects: list[Rect]
    owner: bool
    """Whether this rank, among those that hold the same bytes, is the one that publishes and exports them."""


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a model with its number of layers and experts."""

    rows: tuple[Row, ...]
    layers: int
    experts: int

    def expand(self) -> Iterator[Entry]:
        """Every tensor of the whole model, in the order of the checkpoint: stage by stage, layer by layer."""
        for row in self.rows:
            if row.stage == "first":
                yield Entry(row, 0, 0)
        for layer in range(self.layers):
            for row in self.rows:
                if row.stage == "layer":
                    for expert in range(self.experts if row.per_expert else 1):
                        yield Entry(row, layer, expert)
        for row in self.rows:
            if row.stage == "last":
                yield Entry(row, 0, 0)

    def checkpoint(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every checkpoint tensor, in order; a tensor that two rows claim is refused."""
        out: dict[str, tuple[int, ...]] = {}
        for entry in self.expand():
            for name, shape in entry.sources:
                if name in out:
                    raise SlimxError(f"weight table: {name} belongs to two rows; each checkpoint tensor has one place")
                out[name] = shape
        return out

    def held_by(self, place: Coordinates, sizes: Sizes) -> Iterator[Held]:
        """What the rank at `place` holds."""
        if self.layers % sizes.pipeline:
            raise SlimxError(
                f"trainer.pipeline {sizes.pipeline} does not divide the model's {self.layers} layers; "
                f"choose a divisor of {self.layers}"
            )
        if self.experts % sizes.expert:
            raise SlimxError(
                f"trainer.expert {sizes.expert} does not divide the model's {self.experts} experts; "
                f"choose a divisor of {self.experts}"
            )
        layers, experts = self.layers // sizes.pipeline, self.experts // sizes.expert
        first_layer, first_expert = place.pipeline * layers, place.expert * experts
        for entry in self.expand():
            row = entry.row
            here = {
                "first": place.pipeline == 0,
                "last": place.pipeline == sizes.pipeline - 1,
                "layer": first_layer <= entry.layer < first_layer + layers,
            }[row.stage]
            if row.per_expert:
                here = here and first_expert <= entry.expert < first_expert + experts
                rank, size, replica = place.expert_tensor, sizes.expert_tensor, place.expert_data
            else:
                rank, size, replica = place.tensor, sizes.tensor, place.data
            if not here:
                continue
            shape, rects = row.map.local([matrix(s) for _, s in row.sources], row.axis, rank, size)
            yield Held(
                name=row.megatron.format(layer=entry.layer - first_layer, expert=entry.expert - first_expert),
                shape=shape,
                sources=entry.sources,
                rects=rects,
                owner=replica == 0 and (row.axis is not None or rank == 0),
            )


def matrix(shape: Sequence[int]) -> Shape:
    """The two-dimensional reading of a tensor's shape."""
    return (shape[0], 1) if len(shape) == 1 else (shape[0], shape[1])


def check_coverage(table: Table, sizes: Sizes, places: Sequence[Coordinates]) -> None:
    """Prove that the owners' rectangles cover every checkpoint element exactly once; SlimxError names the tensor.

    The edges of a tensor's rectangles cut it into cells; each cell must lie in exactly one rectangle.
    """
    covered: dict[str, list[Rect]] = {name: [] for name in table.checkpoint()}
    for place in places:
        for held in table.held_by(place, sizes):
            if held.owner:
                for rect in held.rects:
                    covered[held.sources[rect.source][0]].append(rect)
    for name, shape in table.checkpoint().items():
        _check_cover(name, matrix(shape), covered[name])


def _check_cover(name: str, shape: Shape, rects: Sequence[Rect]) -> None:
    rows = sorted({0, shape[0], *(edge for r in rects for edge in (r.row, r.row + r.rows))})
    cols = sorted({0, shape[1], *(edge for r in rects for edge in (r.col, r.col + r.cols))})
    if rows[-1] > shape[0] or cols[-1] > shape[1] or rows[0] < 0 or cols[0] < 0:
        raise SlimxError(f"weight table: a rectangle reaches beyond {name}, which is {shape[0]} x {shape[1]}")
    count = np.zeros((len(rows) - 1, len(cols) - 1), dtype=np.int32)
    for r in rects:
        top, left = bisect_left(rows, r.row), bisect_left(cols, r.col)
        count[top : bisect_left(rows, r.row + r.rows), left : bisect_left(cols, r.col + r.cols)] += 1
    for wrong, what in ((count > 1, "covered twice"), (count == 0, "not covered")):
        if wrong.any():
            row, col = np.argwhere(wrong)[0]
            raise SlimxError(f"weight table: {name} is {what} at row {rows[row]}, column {cols[col]}")
