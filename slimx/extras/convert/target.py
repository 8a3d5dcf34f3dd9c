"""Parallel sizes that a Megatron directory is written for: where its tensors are cut, and which rank reads which file.

Any layout can load any torch_dist checkpoint, but a rank reads every piece that it needs a part of, whole. Cut where
the ranks of a layout cut, each rank reads its own bytes only, from files of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import gcd
from typing import NamedTuple

from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import matrix
from slimx.layout.ranks import Sizes, stage_layers
from slimx.layout.table import Entry, Row, Table

_MOST = 65536
"""Largest value of one parallel size."""
_NAMES = ("tensor", "pipeline", "expert", "expert_tensor", "virtual")


class Box(NamedTuple):
    """Rows and columns of a whole tensor that go to tensor-parallel rank `shard`."""

    shard: int
    row: int
    col: int
    rows: int
    cols: int


def parse_layout(text: str) -> Sizes:
    """Sizes of "tensor=8,pipeline=2,expert=8"; empty: one rank. Raises SlimxError for anything else."""
    given: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in _NAMES or name in given or not _is_size(size):
            raise SlimxError(
                f"--layout {text[:80]}: {part[:40]!r} is no parallel size; write {', '.join(_NAMES)} with a number "
                f"from 1 to {_MOST}, such as tensor=8,expert=8",
                code="convert.layout",
                about="--layout",
            )
        given[name] = int(size)
    # As megatron-core takes it: without a size of their own, experts are split like the rest.
    own = {"expert_tensor": given.get("tensor", 1), **given}
    experts = own["expert_tensor"] * own.get("expert", 1)
    return Sizes(**own, data=experts // gcd(own.get("tensor", 1), experts))


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST)) and 1 <= int(text) <= _MOST


@dataclass(frozen=True, slots=True)
class Target:
    """A model under parallel sizes. Raises SlimxError if they do not fit it."""

    table: Table
    sizes: Sizes

    def __post_init__(self) -> None:
        if self.sizes.stages > self.table.layers:
            raise SlimxError(
                f"--layout: {self.sizes.stages} pipeline stages for {self.table.layers} layers; choose fewer",
                code="convert.layout",
                about="--layout",
            )
        MegatronLayout(self.table, self.sizes)
        for row in self.table.rows:
            cut(row, self._ways(row))

    def boxes(self, entry: Entry) -> list[Box]:
        """The boxes that the tensor of `entry` is cut into."""
        return cut(entry.row, self._ways(entry.row))

    def rank(self, entry: Entry, shard: int) -> int:
        """The first rank that holds shard `shard`."""
        sizes, row = self.sizes, entry.row
        if row.stage == "layer":
            place = next(p for p, held in enumerate(stage_layers(sizes, self.table.layers)) if entry.layer in held)
        else:
            place = 0 if row.stage == "first" else sizes.pipeline - 1
        if row.per_expert:
            owner = entry.expert // (self.table.experts // sizes.expert)
            shard += sizes.expert_tensor * owner
        return place * sizes.stage + shard

    def _ways(self, row: Row) -> int:
        if row.axis is None:
            return 1
        return self.sizes.expert_tensor if row.per_expert else self.sizes.tensor

    def __str__(self) -> str:
        return ",".join(f"{f.name}={getattr(self.sizes, f.name)}" for f in fields(self.sizes) if f.name in _NAMES)


def cut(row: Row, ways: int) -> list[Box]:
    """Cut `row`'s tensor between `ways` ranks. A rank's share of several sources (gate and up) is in several
    boxes of the whole."""
    shapes = [matrix(shape) for _, shape in row.sources]
    (rows, cols), whole = row.map.local(shapes, row.axis, 0, 1)
    if ways == 1:
        return [Box(0, 0, 0, rows, cols)]
    if row.axis == 1:
        row.map.local(shapes, 1, 0, ways)  # refuses what cannot be split
        return [Box(shard, 0, shard * cols // ways, rows, cols // ways) for shard in range(ways)]
    out: list[Box] = []
    for shard in range(ways):
        _, rects = row.map.local(shapes, 0, shard, ways)
        for first, count in _runs(rects, whole):
            out.append(Box(shard, first, 0, count, cols))
    return sorted(out, key=lambda box: box.row)


def _runs(held: list[Rect], whole: list[Rect]) -> list[tuple[int, int]]:
    """First row and number of the rows of a whole tensor that `held`, the rectangles of one rank, fill."""
    runs: list[tuple[int, int]] = []
    for first, count in sorted(_rows(rect, whole) for rect in held):
        if runs and sum(runs[-1]) == first:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((first, count))
    return runs


def _rows(held: Rect, whole: list[Rect]) -> tuple[int, int]:
    """Rows of the whole tensor where the source rows of `held` stand."""
    for rect in whole:
        before, off = divmod(held.row - rect.row, rect.step)
        if rect.source == held.source and not off and 0 <= before < rect.rows:
            return rect.local_row + before, held.rows
    raise AssertionError("a rank's rows are rows of the whole")
