"""Index maps between checkpoint tensors and the slices of them that one parallel rank holds.

A map says, for one Megatron tensor, which rectangles of which Hugging Face tensors make up the part that
tensor-parallel rank `rank` of `size` holds. It is the only description of a layout: loading (Hugging Face ->
Megatron), export and publication (Megatron -> Hugging Face) all read the same rectangles, in one direction or the
other. Vectors of n elements count as n x 1 matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slimx.errors import SlimxError

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rect:
    """`rows x cols` elements at (`row`, `col`) of checkpoint tensor `source`, at (`local_row`, `local_col`) of the
    local one."""

    source: int
    row: int
    col: int
    rows: int
    cols: int
    local_row: int
    local_col: int


class IndexMap(Protocol):
    """How one local tensor is made of checkpoint tensors."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        """Shape of rank `rank`'s tensor and the rectangles that fill it, split `size` ways along `axis` (None:
        whole)."""
        ...


def _share(length: int, rank: int, size: int, what: str) -> tuple[int, int]:
    if length % size:
        raise SlimxError(f"{what} of {length} cannot be split over {size} ranks; choose a size that divides {length}")
    step = length // size
    return rank * step, step


@dataclass(frozen=True, slots=True)
class Copy:
    """One checkpoint tensor, split in equal contiguous parts."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        ((rows, cols),) = shapes
        row = col = 0
        if axis == 0:
            row, rows = _share(rows, rank, size, "a dimension")
        elif axis == 1:
            col, cols = _share(cols, rank, size, "a dimension")
        return (rows, cols), [Rect(0, row, col, rows, cols, 0, 0)]


@dataclass(frozen=True, slots=True)
class Concat:
    """Several checkpoint tensors one below the other; each rank holds its share of every one (gate and up of a
    SwiGLU)."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        if axis == 1:
            raise SlimxError("a concatenation over rows cannot be split over columns; split it over axis 0")
        rects, at = [], 0
        for source, (rows, cols) in enumerate(shapes):
            row = 0
            if axis == 0:
                row, rows = _share(rows, rank, size, "a dimension")
            rects.append(Rect(source, row, 0, rows, cols, at, 0))
            at += rows
        return (at, shapes[0][1]), rects


@dataclass(frozen=True, slots=True)
class InterleaveQKV:
    """Query, key and value, interleaved per query group as Megatron's `linear_qkv` holds them: q..q k v, q..q k v,
    ..."""

    heads: int
    groups: int
    head_dim: int

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        first, count = (
            (0, self.groups) if axis is None else _share(self.groups, rank, size, "the number of query groups")
        )
        per_group = self.heads // self.groups * self.head_dim
        cols = shapes[0][1]
        rects, at = [], 0
        for group in range(first, first + count):
            for source, rows in ((0, per_group), (1, self.head_dim), (2, self.head_dim)):
                rects.append(Rect(source, group * rows, 0, rows, cols, at, 0))
                at += rows
        return (at, cols), rects
