"""Weight-table rows that several vision towers use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import override

from slimx.layout.maps import Blocks, Fused, Pad, Rect, Shape, share
from slimx.layout.table import Group, Row

Parameters = Iterable[tuple[str, tuple[int, ...]]]
"""Pairs of a parameter's name in the tower and its shape."""


def tower_rows(parameters: Parameters, prefix: str, checkpoint: str) -> tuple[Row, ...]:
    """Returns the trainer's weight-table rows of a tower, which the first pipeline stage stores as checkpoints do.
    `prefix`, `checkpoint`: prefixes of the tower's parameters in the model and in checkpoints."""
    return tuple(Row(prefix + name, ((checkpoint + name, shape),), stage="first") for name, shape in parameters)


def linear(name: str, *shape: int, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the parameters of a linear layer, a convolution or a norm. `shape`: shape of the weight."""
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def gated(name: str, size: int, inner: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the parameters of a gated MLP with `size` inputs and outputs."""
    yield from linear(f"{name}.gate_proj", inner, size, bias=bias)
    yield from linear(f"{name}.up_proj", inner, size, bias=bias)
    yield from linear(f"{name}.down_proj", size, inner, bias=bias)


def split_qkv(row: Row, heads: int, group: Group | None) -> Row:
    """Returns the row of SGLang's parameter that contains the tensor of the trainer's `row`: query, key and value, each
    split by `heads` over the ranks of `group`."""
    module, _, kind = row.name.rpartition(".")
    size = row.sources[0][1][0] // 3
    split = Fused(Blocks((heads,) * 3), (size,) * 3)
    return replace(row, name=f"{module}_proj.{kind}", map=split, axis=0, group=group)


def gated_engine_rows(rows: Iterable[Row], multiple: int, group: Group | None) -> Iterator[Row]:
    """Yields `rows` as SGLang stores gated MLPs: a gate and an up projection in one parameter, whose inner size is
    padded to a multiple of `multiple`. Other rows are yielded unchanged."""
    by_name = {row.name: row for row in rows}
    padded = PadEach(multiple)
    for name, row in by_name.items():
        if ".gate_proj." in name:
            sources = row.sources + by_name[name.replace(".gate_proj.", ".up_proj.")].sources
            fused = name.replace(".gate_proj.", ".gate_up_proj.")
            yield replace(row, name=fused, sources=sources, map=padded, axis=0, group=group)
        elif name.endswith(".down_proj.weight"):
            yield replace(row, map=padded, axis=1, group=group)
        elif ".up_proj." not in name:
            yield row


@dataclass(frozen=True, slots=True)
class PadEach(Pad):
    """Map from several sources, concatenated vertically; each rank has its shard of every source after the split axis
    of the source is padded to a multiple of `multiple`. No rectangle fills the padding."""

    @override
    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        rects = []
        local_row = local_cols = 0
        for source, (rows, cols) in enumerate(shapes):
            first, shard, filled = self._shard(cols if axis == 1 else rows, rank, size)
            if axis == 1:
                rect = Rect(source, 0, first, rows, filled, local_row, 0)
                local_cols = shard
                local_row += rows
            else:
                rect = Rect(source, first, 0, filled, cols, local_row, 0)
                local_cols = cols
                local_row += shard
            if filled:
                rects.append(rect)
        return (local_row, local_cols), rects

    def _shard(self, length: int, rank: int, size: int) -> tuple[int, int, int]:
        """Returns the first element of a rank's shard, the length of the shard, and its length without padding."""
        padded = -(-length // self.multiple) * self.multiple
        first, shard = share(padded, rank, size, "the padded inner size of the vision tower")
        return first, shard, max(0, min(shard, length - first))


@dataclass(frozen=True, slots=True)
class Matrices:
    """Map from one source, a stack of `count` matrices, which every rank has as it is; one rectangle per matrix, as
    readers of checkpoints need."""

    count: int

    def local(self, shapes: Sequence[Shape], axis: int | None, rank: int, size: int) -> tuple[Shape, list[Rect]]:
        ((rows, cols),) = shapes
        height = rows // self.count
        return (rows, cols), [Rect(0, row, 0, height, cols, row, 0) for row in range(0, rows, height)]
