"""Parallel sizes for which a Megatron directory is written. They determine how tensors are split, and which rank reads
which file.

Any layout can load any torch_dist checkpoint, but a rank reads complete pieces even if it needs only a part of them. If
tensors are split like the shards of the layout, each rank reads only its own bytes, from separate files.
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
"""Maximum value of a parallel size."""
_NAMES = ("tensor", "pipeline", "expert", "expert_tensor", "virtual")


class ShardBox(NamedTuple):
    """Rectangle of a full tensor that belongs to the tensor-parallel rank `shard`."""

    shard: int
    row: int
    col: int
    rows: int
    cols: int


def parse_layout(text: str) -> Sizes:
    """Parses parallel sizes such as "tensor=8,pipeline=2,expert=8"; an empty `text` means one rank. Raises SlimxError
    for anything else."""
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        if not part:
            continue
        name, _, size = part.partition("=")
        if name not in _NAMES or name in sizes or not _is_size(size):
            raise SlimxError(
                f"--layout {text[:80]}: {part[:40]!r} is invalid; set each of {', '.join(_NAMES)} at most once, to a "
                f"number from 1 to {_MOST}, such as --layout tensor=8,expert=8",
                code="convert.layout",
                about="--layout",
            )
        sizes[name] = int(size)
    # As in megatron-core: without a separate size, experts are split like the other layers.
    tensor = sizes.get("tensor", 1)
    expert = sizes.get("expert", 1)
    expert_tensor = sizes.get("expert_tensor", tensor)
    experts = expert_tensor * expert
    return Sizes(
        tensor=tensor,
        pipeline=sizes.get("pipeline", 1),
        expert=expert,
        expert_tensor=expert_tensor,
        virtual=sizes.get("virtual", 1),
        data=experts // gcd(tensor, experts),
    )


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST)) and 1 <= int(text) <= _MOST


@dataclass(frozen=True, slots=True)
class Target:
    """Model that is split according to given parallel sizes. Raises SlimxError if the model cannot be split into these
    sizes."""

    table: Table
    sizes: Sizes

    def __post_init__(self) -> None:
        if self.sizes.stages > self.table.layers:
            raise SlimxError(
                f"--layout requests {self.sizes.stages} pipeline stages, but the model has only {self.table.layers} "
                f"layers; choose at most {self.table.layers} stages",
                code="convert.layout",
                about="--layout",
            )
        MegatronLayout(self.table, self.sizes)
        for row in self.table.rows:
            cut(row, self._ways(row))

    def boxes(self, entry: Entry) -> list[ShardBox]:
        """Returns the rectangles into which the tensor of `entry` is split."""
        return cut(entry.row, self._ways(entry.row))

    def rank(self, entry: Entry, shard: int) -> int:
        """Returns the first rank that stores shard `shard` of the tensor described by `entry`."""
        sizes = self.sizes
        row = entry.row
        if row.stage == "layer":
            stage = 0
            stages = stage_layers(sizes, self.table.layers)
            while entry.layer not in stages[stage]:
                stage += 1
        else:
            stage = 0 if row.stage == "first" else sizes.pipeline - 1
        if row.per_expert:
            owner = entry.expert // (self.table.experts // sizes.expert)
            shard += sizes.expert_tensor * owner
        return stage * sizes.stage + shard

    def _ways(self, row: Row) -> int:
        if row.axis is None:
            return 1
        return self.sizes.expert_tensor if row.per_expert else self.sizes.tensor

    def __str__(self) -> str:
        parts = []
        for field in fields(self.sizes):
            if field.name in _NAMES:
                parts.append(f"{field.name}={getattr(self.sizes, field.name)}")
        return ",".join(parts)


def cut(row: Row, ways: int) -> list[ShardBox]:
    """Splits the tensor of `row` into shards for `ways` ranks. If the tensor consists of several sources (such as gate
    and up), a rank's shard consists of several rectangles."""
    shapes = [matrix(shape) for _, shape in row.sources]
    (rows, cols), full = row.map.local(shapes, row.axis, 0, 1)
    if ways == 1:
        return [ShardBox(0, 0, 0, rows, cols)]
    if row.axis == 1:
        row.map.local(shapes, 1, 0, ways)  # raises an error for a tensor that cannot be split
        return [ShardBox(shard, 0, shard * cols // ways, rows, cols // ways) for shard in range(ways)]
    out: list[ShardBox] = []
    for shard in range(ways):
        _, rects = row.map.local(shapes, 0, shard, ways)
        for first, count in _runs(rects, full):
            out.append(ShardBox(shard, first, 0, count, cols))
    return sorted(out, key=lambda box: box.row)


def _runs(local: list[Rect], full: list[Rect]) -> list[tuple[int, int]]:
    """Returns the ranges of consecutive rows of the full tensor that one rank stores, each as (first row, number of
    rows). `local`: rectangles of the rank's shard; `full`: rectangles of the full tensor."""
    runs: list[tuple[int, int]] = []
    for first, count in sorted(_rows(rect, full) for rect in local):
        if runs and sum(runs[-1]) == first:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((first, count))
    return runs


def _rows(local: Rect, full: list[Rect]) -> tuple[int, int]:
    """Returns the rows of the full tensor, as (first row, number of rows), that contain the source rows of the
    rectangle `local`. `full`: rectangles of the full tensor."""
    for rect in full:
        before, off = divmod(local.row - rect.row, rect.step)
        if rect.source == local.source and not off and 0 <= before < rect.rows:
            return rect.local_row + before, local.rows
    raise AssertionError("a rank's rows are not rows of the full tensor; report this error to the developers of slimx")
