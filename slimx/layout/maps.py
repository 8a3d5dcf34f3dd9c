"""The algebra of index maps: which rectangles of which checkpoint tensors make up one tensor of one parallel rank.

A map is the only description of a layout. Loading (Hugging Face -> Megatron), export and publication (Megatron ->
Hugging Face, Megatron -> engine) read the same rectangles, in one direction or the other. Every tensor is read as a
matrix: a vector of n elements is n x 1, a stack of E matrices of M x N is (E * M) x N. Stacks of experts and transposed
tensors of a checkpoint are no maps but names of sources (`slimx.layout.table`).

    Copy()                       the tensor itself
    Concat()                     tensors one below the other; a rank holds its share of each (gate and up of a SwiGLU)
    Blocks(heads)                the same with shares counted in heads, which repeat if there are few (an engine's qkv)
    InterleaveQKV(heads, ...)    query, key and value interleaved per query group (Megatron's linear_qkv)
    Fused(map, rows)             another map's tensors, stored one below the other in one (a checkpoint's fused qkv)
    Sections(blocks, cuts)       runs of rows of several tensors, sorted into sections (the projections of a delta net)
    Deinterleave()               rows that alternate between two matrices (gate up gate up ...), one below the other
    Once()                       the tensor on the first rank, zeros on the others (a bias that ranks would add up)
    RotateHalf(...)              rows of every head reordered from rotary pairs (x0 y0 x1 y1) to halves (x0 x1 y0 y1)
    Pad(multiple)                rows appended up to a multiple (a padded vocabulary); no rectangle fills them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from slimx.errors import SlimxError

Shape = tuple[int, int]


class Rect(NamedTuple):
    """`rows x cols` elements of a local tensor and where they stand in checkpoint tensor `source`.

    Local element (local_row + i, local_col + j) is source element (row + i * step, col + j).
    """

    source: int
    row: int
    col: int
    rows: int
    cols: int
    local_row: int
    local_col: int
    step: int = 1

    @property
    def extent(self) -> Shape:
        """Rows and columns of the source between the rectangle's first and last element."""
        return (self.rows - 1) * self.step + 1, self.cols


class IndexMap(Protocol):
    """A map from checkpoint tensors to one local tensor."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        """Shape of rank `rank`'s tensor and the rectangles that fill it, split `size` ways along `axis` (None: whole).

        `shapes`: of the checkpoint tensors, as matrices.
        """
        ...


def share(length: int, rank: int, size: int, what: str = "a dimension") -> tuple[int, int]:
    """First element and length of rank `rank`'s share of `length`; SlimxError if `size` does not divide it."""
    if length % size:
        raise SlimxError(
            f"{what} of {length} cannot be split over {size} ranks; choose a size that divides {length}",
            code="maps.share",
            about=what,
        )
    step = length // size
    return rank * step, step


def _refuse_columns(axis: int | None, what: str) -> None:
    if axis == 1:
        told = f"{what}: rows that are put together or reordered cannot be split over columns; split them over axis 0"
        raise SlimxError(told, code="maps.columns", about=what)


@dataclass(frozen=True, slots=True)
class Copy:
    """One checkpoint tensor, split in equal contiguous parts."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        ((rows, cols),) = shapes
        row = col = 0
        if axis == 0:
            row, rows = share(rows, rank, size)
        elif axis == 1:
            col, cols = share(cols, rank, size)
        return (rows, cols), [Rect(0, row, col, rows, cols, 0, 0)]


@dataclass(frozen=True, slots=True)
class Concat:
    """Several checkpoint tensors one below the other; each rank holds its share of every one."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        _refuse_columns(axis, "concatenation")
        rects, at = [], 0
        for source, (rows, cols) in enumerate(shapes):
            row = 0
            if axis == 0:
                row, rows = share(rows, rank, size)
            rects.append(Rect(source, row, 0, rows, cols, at, 0))
            at += rows
        return (at, shapes[0][1]), rects


@dataclass(frozen=True, slots=True)
class Blocks:
    """Several checkpoint tensors one below the other, the i-th made of `heads[i]` equal heads.

    Where there are fewer heads than ranks, each is held by several ranks (key and value heads of an engine under more
    tensor parallelism than it has groups).
    """

    heads: tuple[int, ...]

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        ranks, place = (1, 0) if axis is None else (size, rank)
        rects, at = [], 0
        for source, ((rows, cols), heads) in enumerate(zip(shapes, self.heads, strict=True)):
            per_head = rows // heads
            if heads >= ranks:
                first, count = share(heads, place, ranks, "the number of heads")
            else:
                _, copies = share(ranks, 0, heads, "the number of ranks")
                first, count = place // copies, 1
            rects.append(Rect(source, first * per_head, 0, count * per_head, cols, at, 0))
            at += count * per_head
        return (at, shapes[0][1]), rects


@dataclass(frozen=True, slots=True)
class InterleaveQKV:
    """Query, key and value, interleaved per query group as Megatron's `linear_qkv` holds them: q..q k v, q..q k v,
    ...

    `gated`: the query's tensor holds a gate behind every head (q g q g ...), and so does each group (q..q g..g k v)."""

    heads: int
    groups: int
    head_dim: int
    gated: bool = False

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        first, count = (
            (0, self.groups) if axis is None else share(self.groups, rank, size, "the number of query groups")
        )
        per_group, head = self.heads // self.groups, self.head_dim
        cols = shapes[0][1]
        rects, at = [], 0
        for group in range(first, first + count):
            heads = range(group * per_group, (group + 1) * per_group)
            if self.gated:
                runs = [(0, (2 * each + gate) * head, head) for gate in (0, 1) for each in heads]
            else:
                runs = [(0, heads.start * head, per_group * head)]
            for source, row, rows in (*runs, (1, group * head, head), (2, group * head, head)):
                rects.append(Rect(source, row, 0, rows, cols, at, 0))
                at += rows
        return (at, cols), rects


@dataclass(frozen=True, slots=True)
class Fused:
    """One checkpoint tensor that stores, one below the other, those that `map` takes apart."""

    map: IndexMap
    rows: tuple[int, ...]
    """Rows of each of them."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        ((_, cols),) = shapes
        shape, rects = self.map.local([(rows, cols) for rows in self.rows], axis, rank, size)
        starts = [0, *accumulate(self.rows)]
        return shape, [rect._replace(source=0, row=rect.row + starts[rect.source]) for rect in rects]


class Cut(NamedTuple):
    """Rows of tensor `source`: a run of `rows` rows for every block, the first from `row` on, one every `stride`."""

    source: int
    row: int
    rows: int
    stride: int


@dataclass(frozen=True, slots=True)
class Sections:
    """Sections one below the other, each made of one run of rows per block; each rank holds its share of the blocks in
    every section. So heads that stand together in the checkpoint (q k v q k v ...), or one kind behind the other in one
    tensor, come to stand kind by kind."""

    blocks: int
    cuts: tuple[Cut, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of every section of the whole tensor."""
        return tuple(self.blocks * cut.rows for cut in self.cuts)

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        _refuse_columns(axis, "sections")
        first, count = (0, self.blocks) if axis is None else share(self.blocks, rank, size, "the number of blocks")
        cols = shapes[0][1]
        rects, at = [], 0
        for source, row, rows, stride in self.cuts:
            start = row + first * stride
            if stride == rows:
                rects.append(Rect(source, start, 0, count * rows, cols, at, 0))
            elif rows == 1:
                rects.append(Rect(source, start, 0, count, cols, at, 0, step=stride))
            else:
                rects += [Rect(source, start + k * stride, 0, rows, cols, at + k * rows, 0) for k in range(count)]
            at += count * rows
        return (at, cols), rects


@dataclass(frozen=True, slots=True)
class Deinterleave:
    """One tensor whose rows alternate between two matrices: the rows of the first, then those of the second; each rank
    holds its share of both."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        _refuse_columns(axis, "alternating rows")
        ((rows, cols),) = shapes
        _, half = share(rows, 0, 2, "a number of rows that alternate")
        first, count = (0, half) if axis is None else share(half, rank, size)
        rects = [Rect(0, 2 * first + part, 0, count, cols, part * count, 0, step=2) for part in (0, 1)]
        return (2 * count, cols), rects


@dataclass(frozen=True, slots=True)
class Once:
    """One tensor on the first rank; the others hold zeros, so that the sum over all ranks holds it once."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        ((rows, cols),) = shapes
        return (rows, cols), [Rect(0, 0, 0, rows, cols, 0, 0)] if rank == 0 else []


@dataclass(frozen=True, slots=True)
class RotateHalf:
    """One tensor whose rows are heads of `head_dim`; `rotary` rows of each, from row `offset` on, stand in the
    checkpoint as rotary pairs (x0 y0 x1 y1 ...) and here as halves (x0 x1 ... y0 y1 ...)."""

    head_dim: int
    rotary: int
    offset: int = 0

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        _refuse_columns(axis, "rotary rows")
        ((rows, cols),) = shapes
        heads = rows // self.head_dim
        first, count = (0, heads) if axis is None else share(heads, rank, size, "the number of heads")
        half, end = self.rotary // 2, self.offset + self.rotary
        rects = []
        for head in range(count):
            here, there = head * self.head_dim, (first + head) * self.head_dim
            for row, length, local, step in (
                (0, self.offset, 0, 1),
                (self.offset, half, self.offset, 2),
                (self.offset + 1, half, self.offset + half, 2),
                (end, self.head_dim - end, end, 1),
            ):
                if length:
                    rects.append(Rect(0, there + row, 0, length, cols, here + local, 0, step))
        return (count * self.head_dim, cols), rects


@dataclass(frozen=True, slots=True)
class Pad:
    """One tensor with rows appended, which no rectangle fills, up to a multiple of `multiple` (times the number of
    ranks, where they could not share that equally)."""

    multiple: int

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        ((rows, cols),) = shapes
        padded = -(-rows // self.multiple) * self.multiple
        if padded % size:
            padded = -(-rows // (self.multiple * size)) * self.multiple * size
        first, count = (0, padded) if axis is None else share(padded, rank, size, "a padded vocabulary")
        held = max(0, min(count, rows - first))
        return (count, cols), [Rect(0, first, 0, held, cols, 0, 0)] if held else []
