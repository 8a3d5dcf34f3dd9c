"""Index maps: which rectangles of which checkpoint tensors make up one tensor of one parallel rank.

A map is the only description of a layout: loading (Hugging Face -> Megatron), export and publication (Megatron ->
Hugging Face, Megatron -> engine) use the same rectangles, with the direction of the copy reversed. Every tensor is
treated as a matrix: a vector of n elements as n x 1, a stack of E matrices of M x N as (E * M) x N. If a checkpoint
stacks experts or transposes a tensor, the names of the sources express this instead of the map (`slimx.layout.table`).

    Copy()                       one tensor, split in equal parts
    Concat()                     concatenated tensors; a rank has its shard of each (gate and up of a SwiGLU)
    Blocks(heads)                concatenated tensors, split by heads; heads are replicated if there are fewer than
                                 ranks (an engine's qkv)
    InterleaveQKV(heads, ...)    query, key and value interleaved per query group (Megatron's linear_qkv)
    Fused(map, rows)             as `map`, whose sources the checkpoint stores as one concatenated tensor (fused qkv)
    Sections(blocks, cuts)       rows of several tensors, grouped into sections (the projections of a delta net)
    Deinterleave()               rows that alternate between two matrices (gate up gate up ...), concatenated
    Once()                       one tensor on the first rank, zeros on the others (a bias that ranks sum up)
    RotateHalf(...)              rows of every head reordered from rotary pairs (x0 y0 x1 y1) to halves (x0 x1 y0 y1)
    Pad(multiple)                one tensor with rows appended up to a multiple (a padded vocabulary)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from slimx.errors import SlimxError

Shape = tuple[int, int]


class Rect(NamedTuple):
    """Rectangle of `rows` x `cols` elements that a local tensor shares with a checkpoint tensor.

    Local element (local_row + i, local_col + j) is element (row + i * step, col + j) of the checkpoint tensor with
    index `source`."""

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
        """Numbers of rows and columns that the rectangle spans in the checkpoint tensor, including skipped rows."""
        return (self.rows - 1) * self.step + 1, self.cols


class IndexMap(Protocol):
    """Map from one or several checkpoint tensors, its sources, to one tensor of a rank."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        """Returns the shape of rank `rank`'s tensor and the rectangles that fill it.

        `shapes`: shapes of the sources, as matrices. `axis`: axis that is split over `size` ranks; None if every rank
        has the whole tensor."""


def share(length: int, rank: int, size: int, name: str = "a dimension") -> tuple[int, int]:
    """Returns the start index and the length of rank `rank`'s shard of a dimension of `length` elements that is split
    over `size` ranks.

    `name`: description of the dimension for the SlimxError that is raised if `size` does not divide `length`."""
    if length % size:
        raise SlimxError(
            f"{name} is {length}, but must be a multiple of {size}; split it over a number of ranks that divides it",
            code="maps.share",
            about=name,
        )
    step = length // size
    return rank * step, step


def _shard(length: int, axis: int | None, rank: int, size: int, name: str) -> tuple[int, int]:
    """Returns the start index and the length of a rank's shard, as `share` does; 0 and `length` if `axis` is None,
    which means that the dimension is not split."""
    if axis is None:
        return 0, length
    return share(length, rank, size, name)


def _refuse_columns(axis: int | None, name: str) -> None:
    if axis == 1:
        raise SlimxError(
            f"a layout with {name} cannot be split along columns (axis 1); split the layout along rows (axis 0)",
            code="maps.columns",
            about=name,
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """Map from one source: every rank stores all of it, or an equal, contiguous shard of its rows or columns."""

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
    """Map from several sources, concatenated vertically; each rank has its shard of every source."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        _refuse_columns(axis, "concatenation")
        rects = []
        local_row = 0
        for source, (rows, cols) in enumerate(shapes):
            row = 0
            if axis == 0:
                row, rows = share(rows, rank, size)
            rects.append(Rect(source, row, 0, rows, cols, local_row, 0))
            local_row += rows
        return (local_row, shapes[0][1]), rects


@dataclass(frozen=True, slots=True)
class Blocks:
    """Map from several sources, concatenated vertically and split by heads; source i consists of `heads[i]` equal
    heads.

    If there are fewer heads than ranks, several ranks store the same head, as for key and value heads in an engine with
    more tensor-parallel ranks than query groups."""

    heads: tuple[int, ...]

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        if axis is None:
            rank = 0
            size = 1
        rects = []
        local_row = 0
        for source, ((rows, cols), heads) in enumerate(zip(shapes, self.heads, strict=True)):
            per_head = rows // heads
            if heads >= size:
                first, count = share(heads, rank, size, "the number of heads")
            else:
                _, replicas = share(size, 0, heads, "the number of ranks")
                first = rank // replicas
                count = 1
            rects.append(Rect(source, first * per_head, 0, count * per_head, cols, local_row, 0))
            local_row += count * per_head
        return (local_row, shapes[0][1]), rects


@dataclass(frozen=True, slots=True)
class InterleaveQKV:
    """Map from query, key and value to Megatron's `linear_qkv`, which interleaves them by query group: q..q k v, q..q k
    v, ...

    `heads`, `groups`: numbers of attention heads and of query groups. `gated`: True if the query tensor has a gate
    after every head (q g q g ...); each group then has the gates after the queries (q..q g..g k v)."""

    heads: int
    groups: int
    head_dim: int
    gated: bool = False

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        first, count = _shard(self.groups, axis, rank, size, "the number of query groups")
        per_group = self.heads // self.groups
        cols = shapes[0][1]
        rects = []
        local_row = 0
        for group in range(first, first + count):
            for source, row, rows in self._runs(group, per_group):
                rects.append(Rect(source, row, 0, rows, cols, local_row, 0))
                local_row += rows
        return (local_row, cols), rects

    def _runs(self, group: int, per_group: int) -> list[tuple[int, int, int]]:
        """Returns (source, first row, number of rows) for every range of consecutive rows in query group `group`."""
        dim = self.head_dim
        heads = range(group * per_group, (group + 1) * per_group)
        if self.gated:
            runs = []
            for first_row in (0, dim):  # the queries of all heads, then their gates
                runs += [(0, 2 * head * dim + first_row, dim) for head in heads]
        else:
            runs = [(0, heads.start * dim, per_group * dim)]
        return [*runs, (1, group * dim, dim), (2, group * dim, dim)]


@dataclass(frozen=True, slots=True)
class Fused:
    """Map that applies `map` to the row ranges of a single source: the checkpoint stores the sources of `map` as one
    tensor, concatenated vertically."""

    map: IndexMap
    rows: tuple[int, ...]
    """Number of rows in each source of `map`."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        ((_, cols),) = shapes
        shape, rects = self.map.local([(rows, cols) for rows in self.rows], axis, rank, size)
        starts = [0, *accumulate(self.rows)]
        return shape, [rect._replace(source=0, row=rect.row + starts[rect.source]) for rect in rects]


class Cut(NamedTuple):
    """Rows of source `source` that make up a section: `rows` consecutive rows in each block. They begin at `row` in the
    first block, and `stride` rows later in each following block."""

    source: int
    row: int
    rows: int
    stride: int


@dataclass(frozen=True, slots=True)
class Sections:
    """Map from sources to vertically concatenated sections, one per kind of rows (such as q, k and v).

    Each block has one range of consecutive rows in every section, and each rank has its shard of the blocks in every
    section. In the checkpoint, the kinds may be interleaved by block (q k v q k v ...) or stored one after the other in
    one tensor."""

    blocks: int
    cuts: tuple[Cut, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each section in the unsplit tensor."""
        return tuple(self.blocks * cut.rows for cut in self.cuts)

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        _refuse_columns(axis, "sections")
        first, count = _shard(self.blocks, axis, rank, size, "the number of blocks")
        cols = shapes[0][1]
        rects = []
        local_row = 0
        for source, row, rows, stride in self.cuts:
            start = row + first * stride
            if stride == rows:
                rects.append(Rect(source, start, 0, count * rows, cols, local_row, 0))
            elif rows == 1:
                rects.append(Rect(source, start, 0, count, cols, local_row, 0, step=stride))
            else:
                for k in range(count):
                    rects.append(Rect(source, start + k * stride, 0, rows, cols, local_row + k * rows, 0))
            local_row += count * rows
        return (local_row, cols), rects


@dataclass(frozen=True, slots=True)
class Deinterleave:
    """Map that separates two matrices whose rows alternate in one source: the local tensor contains the rows of the
    first matrix, then those of the second.

    Each rank stores its shard of both matrices."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        _refuse_columns(axis, "alternating rows")
        ((rows, cols),) = shapes
        _, half = share(rows, 0, 2, "a number of rows that alternate")
        first, count = _shard(half, axis, rank, size, "a dimension")
        even = Rect(0, 2 * first, 0, count, cols, 0, 0, step=2)
        odd = Rect(0, 2 * first + 1, 0, count, cols, count, 0, step=2)
        return (2 * count, cols), [even, odd]


@dataclass(frozen=True, slots=True)
class Once:
    """Map for a bias in a layer whose ranks sum their outputs: the first rank stores the whole source, every other rank
    zeros."""

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        ((rows, cols),) = shapes
        return (rows, cols), [Rect(0, 0, 0, rows, cols, 0, 0)] if rank == 0 else []


@dataclass(frozen=True, slots=True)
class RotateHalf:
    """Map from one source whose rows are divided into heads of `head_dim` rows. In each head, the `rotary` rows from
    row `offset` are rotary pairs in the checkpoint (x0 y0 x1 y1 ...) and halves in the local tensor (x0 x1 ... y0 y1
    ...); the others keep their order."""

    head_dim: int
    rotary: int
    offset: int = 0

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        _refuse_columns(axis, "rotary rows")
        ((rows, cols),) = shapes
        heads = rows // self.head_dim
        first, count = _shard(heads, axis, rank, size, "the number of heads")
        half = self.rotary // 2
        end = self.offset + self.rotary
        rects = []
        for head in range(count):
            local_start = head * self.head_dim
            source_start = (first + head) * self.head_dim
            for row, length, local, step in (
                (0, self.offset, 0, 1),
                (self.offset, half, self.offset, 2),
                (self.offset + 1, half, self.offset + half, 2),
                (end, self.head_dim - end, end, 1),
            ):
                if length:
                    rects.append(Rect(0, source_start + row, 0, length, cols, local_start + local, 0, step))
        return (count * self.head_dim, cols), rects


@dataclass(frozen=True, slots=True)
class Pad:
    """Map from one source to a tensor whose number of rows is padded to a multiple of `multiple` that is also divisible
    by the number of ranks. No rectangle fills the padding rows."""

    multiple: int

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        ((rows, cols),) = shapes
        padded = -(-rows // self.multiple) * self.multiple
        if padded % size:
            padded = -(-rows // (self.multiple * size)) * self.multiple * size
        first, count = _shard(padded, axis, rank, size, "a padded vocabulary")
        filled = max(0, min(count, rows - first))
        return (count, cols), [Rect(0, first, 0, filled, cols, 0, 0)] if filled else []
