"""The publication plan: which rectangle of which rank's tensor goes where, compiled from shapes alone.

Source and target are two layouts of the same checkpoint tensors (`slimx.layout`); a plan is where they meet. The target
is either the checkpoint itself, in Hugging Face names (`slimx.layout.parts`), or the fused tensors of every rank
of an engine, so that each engine rank receives its own bytes and no others. Every element of every target tensor is
proven to be written exactly once. The same inputs give the same bytes on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.number_formats import ITEMSIZE, Precision
from slimx.layout.parts import Part, check_boxes, matrix
from slimx.reshard.plan.intersect import Move, moves

FORMAT = 2
"""Format of `Plan.to_bytes`."""
MOVES = 2**22
"""Most moves of one plan: 10 times those of any configuration in configs/moe."""
ALIGNMENT = 64
"""Bytes: tensors start on a cache line, so that the receiver's views are aligned for every dtype."""

MOVE = np.dtype(
    [
        ("source", np.int32),  # rank that holds the elements
        ("parameter", np.int32),  # index into Plan.parameters
        ("target", np.int32),  # rank that takes them
        ("bucket", np.int32),
        ("tensor", np.int32),  # index into Plan.buckets[target][bucket].tensors
        ("source_row", np.int32),
        ("source_col", np.int32),
        ("source_step", np.int32),  # rows from one source row to the next
        ("row", np.int32),
        ("col", np.int32),
        ("row_step", np.int32),
        ("rows", np.int32),
        ("cols", np.int32),
    ]
)


class BucketTensor(msgspec.Struct, frozen=True):
    """One tensor's place in its bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket."""
    nbytes: int
    scale_of: int = -1
    """Index in the bucket of the codes whose block scales these are; -1: values."""
    column: bool = False
    """True if moves read it as one column whatever its shape (`Part.column`)."""

    @property
    def width(self) -> int:
        """Elements of a row as moves count them."""
        return 1 if self.column else matrix(self.shape)[1]


class Bucket(msgspec.Struct, frozen=True):
    """Tensors that travel together to one target rank; `size` in bytes."""

    tensors: tuple[BucketTensor, ...]
    size: int


class Parameter(msgspec.Struct, frozen=True):
    """A tensor of the trainer that moves read from, under the name that it has on its ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Holders(NamedTuple):
    """The source ranks that hold what a move takes."""

    groups: list[tuple[int, ...]]
    """Sets of ranks that hold the same bytes."""
    of: np.ndarray
    """[moves] index into `groups`."""


class Plan:
    """A compiled plan of copies (`compile_plan`)."""

    def __init__(
        self,
        precision: Precision,
        parameters: list[Parameter],
        buckets: list[list[Bucket]],
        moved: np.ndarray,
        unread: tuple[str, ...] = (),
        holders: Holders | None = None,
    ):
        """`buckets[target][bucket]`: ranks with fewer buckets than others have empty ones at the end. `moved` [moves]
        of `MOVE`, sorted by bucket, then by source rank. `unread`: checkpoint tensors of the source that no target
        takes. `holders`: who else could send each move; a plan read from bytes does not know it.
        """
        self.precision, self.parameters, self.buckets, self.moved = precision, parameters, buckets, moved
        self.unread, self.holders = unread, holders

    @property
    def targets(self) -> int:
        return len(self.buckets)

    @property
    def count(self) -> int:
        """Buckets of each target."""
        return len(self.buckets[0])

    def moves_of(self, source: int, bucket: int) -> np.ndarray:
        """The moves that rank `source` contributes to `bucket`, for all targets."""
        start, stop = self._slices.get((bucket, source), (0, 0))
        return self.moved[start:stop]

    @cached_property
    def _slices(self) -> dict[tuple[int, int], tuple[int, int]]:
        keys = np.stack([self.moved["bucket"], self.moved["source"]], axis=1)
        if not len(keys):
            return {}
        edges = [0, *(np.flatnonzero(np.any(keys[1:] != keys[:-1], axis=1)) + 1).tolist(), len(keys)]
        return {tuple(keys[start].tolist()): (start, stop) for start, stop in pairwise(edges)}

    @cached_property
    def dtypes(self) -> tuple[list[str], np.ndarray]:
        """(Names of dtypes, for each move [moves] the index of the one of the tensor that it fills)."""
        names: dict[str, int] = {}
        of_target: dict[int, list[list[int]]] = {}  # engines that are copies of one another share their lists
        for target in self.buckets:
            if id(target) not in of_target:
                of_target[id(target)] = [[names.setdefault(t.dtype, len(names)) for t in b.tensors] for b in target]
        held = [of_target[id(target)] for target in self.buckets]
        first = np.cumsum([0, *(len(bucket) for target in held for bucket in target)])
        flat = np.array([dtype for target in held for bucket in target for dtype in bucket], dtype=np.int8)
        bucket = self.moved["target"].astype(np.int64) * self.count + self.moved["bucket"]
        return list(names), flat[first[bucket] + self.moved["tensor"]]

    @property
    def launches(self) -> int:
        """Kernel launches of one publication by the rank that has most of them: one per bucket."""
        return max(Counter(source for _, source in self._slices).values(), default=0)

    def to_bytes(self) -> bytes:
        """The plan, the same bytes for the same plan."""
        head = (self.precision, self.parameters, self.buckets, self.unread)
        return msgspec.msgpack.encode((FORMAT, msgspec.to_builtins(head), self.moved.tobytes()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """The plan that `to_bytes` wrote. Raises SlimxError for anything else."""
        try:
            form, head, moved = msgspec.msgpack.decode(data)
            if form != FORMAT:
                raise SlimxError(
                    f"plan: written in format {form}, this slimx reads {FORMAT}; compile it again",
                )
            kinds = tuple[Precision, list[Parameter], list[list[Bucket]], tuple[str, ...]]
            precision, parameters, buckets, unread = msgspec.convert(head, kinds, strict=False)
            return cls(precision, parameters, buckets, np.frombuffer(moved, dtype=MOVE), unread)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise SlimxError(
                f"plan: these {len(data)} bytes are no plan ({error}); compile it again",
            ) from error


def compile_plan(
    source: Iterable[Part], target: Iterable[Part], *, precision: Precision, bucket_bytes: int, ranks: int = 1
) -> Plan:
    """The moves that fill every tensor of `target` (`ranks` of them) from `source`, in buckets of `bucket_bytes`.

    Where several source ranks hold the same bytes, the one that sends least so far sends them. A tensor larger than a
    bucket travels alone. Raises SlimxError naming a tensor that the source does not hold, one that comes twice for a
    rank, or a shard that a quantisation block would cross.
    """
    return _Compiler(source, precision, bucket_bytes, ranks).compile(target)


class _Compiler:
    def __init__(self, source: Iterable[Part], precision: Precision, bucket_bytes: int, ranks: int):
        self.precision, self.bucket_bytes = precision, bucket_bytes
        self.parameters: list[Parameter] = []
        self.numbers: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self.holders: list[tuple[int, tuple[int, ...]]] = []
        """Per source part its parameter and the ranks that hold it."""
        self.held: dict[str, tuple[list[Rect], list[int]]] = {}
        """Checkpoint tensor -> its rectangles in source parts, and those parts."""
        for part in source:
            if not part.copy:
                self._add_source(part)
        self.geometries: dict[tuple[Rect, ...], int] = {}
        self.geometry_of = {
            name: self.geometries.setdefault(tuple(rects), len(self.geometries))
            for name, (rects, _) in self.held.items()
        }
        self.met: dict[tuple[int, ...], tuple[Move, ...]] = {}
        self.checked: set[tuple[tuple[int, ...], tuple[Rect, ...]]] = set()
        self.load = np.zeros(1 + max((max(held) for _, held in self.holders), default=0), dtype=np.int64)
        self.indices: dict[int, np.ndarray] = {}
        self.tensors: list[list[list[BucketTensor]]] = [[[]] for _ in range(ranks)]
        self.ends = [0] * ranks
        self.placed: list[set[str]] = [set() for _ in range(ranks)]
        """Names of each rank's tensors."""
        self.rows: list[tuple[int, ...]] = []
        self.groups: dict[tuple[int, ...], int] = {}
        self.group_of: list[int] = []
        """Index into `groups` of each of `rows`."""
        self.read: set[str] = set()

    def compile(self, target: Iterable[Part]) -> Plan:
        for part in target:
            self._add_target(part)
        moved = np.array(self.rows, dtype=MOVE)
        order = np.lexsort((moved["tensor"], moved["target"], moved["source"], moved["bucket"]))
        count = max(len(buckets) for buckets in self.tensors)
        buckets = [
            [Bucket(tuple(tensors), _end(tensors)) for tensors in per_rank + [[]] * (count - len(per_rank))]
            for per_rank in self.tensors
        ]
        unread = tuple(name for name in self.held if name not in self.read)
        holders = Holders(list(self.groups), np.array(self.group_of, dtype=np.int32)[order])
        return Plan(self.precision, self.parameters, buckets, moved[order], unread, holders)

    def _add_source(self, part: Part) -> None:
        form = part.name, part.dtype or self.precision.trainer, part.shape
        number = self.numbers.setdefault(form, len(self.parameters))
        if number == len(self.parameters):
            self.parameters.append(Parameter(*form))
        self.holders.append((number, part.ranks))
        for rect in part.rects:
            rects, parts = self.held.setdefault(part.sources[rect.source], ([], []))
            rects.append(rect)
            parts.append(len(self.holders) - 1)

    def _add_target(self, part: Part) -> None:
        self._check_filled(part)
        found = []
        for rect in part.rects:
            name = part.sources[rect.source]
            if name not in self.held:
                raise SlimxError(
                    f"plan: {part.name} needs checkpoint tensor {name}, which the trainer does not hold",
                    code="plan.unheld",
                    about=name,
                )
            self.read.add(name)
            holders = self.held[name][1]
            for move in self._meet(name, rect, part.quantised):
                found.append((holders[move.source], move, rect))
        itemsize = ITEMSIZE[part.dtype or self.precision.trainer]
        if len(self.rows) + len(found) * len(part.ranks) > MOVES:
            raise SlimxError(
                f"plan: {len(self.ends)} target ranks take more than {MOVES} moves, counted up to {part.name}; keep "
                "experts whole: raise rollout.engines.expert, or lower rollout.engines.tensor or trainer.expert_tensor",
                code="plan.moves",
                about=part.name,
            )
        for rank in part.ranks:
            if rank >= len(self.ends):
                raise SlimxError(
                    f"plan: {part.name} is for target rank {rank} of {len(self.ends)}; pass the ranks' number",
                    code="plan.rank",
                    about=part.name,
                )
            if part.name in self.placed[rank]:
                raise SlimxError(
                    f"plan: {part.name} comes twice for target rank {rank}; remove one of its table's rows",
                    code="plan.twice",
                    about=part.name,
                )
            self.placed[rank].add(part.name)
            bucket, tensor = self._place(part, rank)
            for holder, m, rect in found:
                parameter, ranks = self.holders[holder]
                sender = self._least_busy(ranks)
                self.load[sender] += m.rows * m.cols * itemsize
                source = m.source_row, m.source_col, m.source_step
                place = rect.local_row + m.row, rect.local_col + m.col, m.row_step
                self.group_of.append(self.groups.setdefault(ranks, len(self.groups)))
                self.rows.append((sender, parameter, rank, bucket, tensor, *source, *place, m.rows, m.cols))

    def _least_busy(self, ranks: tuple[int, ...]) -> int:
        """The rank of `ranks` that sends least so far; the first of those that do."""
        if len(ranks) == 1:
            return ranks[0]
        if id(ranks) not in self.indices:  # parts of one kind share the tuple, which `holders` keeps
            self.indices[id(ranks)] = np.array(ranks)
        return ranks[int(self.load[self.indices[id(ranks)]].argmin())]

    def _check_filled(self, part: Part) -> None:
        """Each element of the target tensor is in one rectangle; rows without any may only be padding at the end."""
        # Source numbers count the experts of a stack and say nothing about the place.
        key = part.matrix, part.rects
        if key not in self.checked:
            rows, cols = part.matrix
            filled = max((r.local_row + r.rows for r in part.rects), default=0)
            boxes = [(r.local_row, r.local_col, r.rows, r.cols) for r in part.rects]
            shape = (min(filled, rows), cols)
            check_boxes(f"plan: {part.name}", shape, np.array(boxes, dtype=np.int64).reshape(-1, 4))
            self.checked.add(key)

    def _meet(self, name: str, rect: Rect, quantised: bool) -> tuple[Move, ...]:
        """Moves that fill `rect`, with target rows and columns that count from its first. Every expert of a stack lies
        elsewhere in it, and meets the same parts."""
        quantised = quantised and self.precision.quantisation is not None
        high, wide = self.precision.quantisation.block if quantised else (1, 1)
        place = rect.row, rect.col, rect.rows, rect.cols, rect.step, rect.local_row % high, rect.local_col % wide
        key = self.geometry_of[name], *place, quantised
        if key not in self.met:
            found = moves(self.held[name][0], rect._replace(local_row=0, local_col=0), name)
            if quantised:
                for move in found:
                    self._check_blocks(name, move, rect)
            self.met[key] = found
        return self.met[key]

    def _check_blocks(self, name: str, move: Move, rect: Rect) -> None:
        """A block is quantised where its elements are: it must lie in one rectangle of one rank, and be a block of the
        checkpoint's tensor too, or engines of other sizes would get other codes."""
        if max(move.row_step, rect.step) > 1:
            raise SlimxError(
                f"plan: {name} is reordered inside its quantisation blocks; publish it unquantised",
                code="plan.reordered",
                about=name,
            )
        high, wide = self.precision.quantisation.block
        row, col = (move.row, rect.row), (move.col, rect.col)
        for local, (inside, first), length, whole, block in (
            (rect.local_row + move.row, row, move.rows, rect.rows, high),
            (rect.local_col + move.col, col, move.cols, rect.cols, wide),
        ):
            # Where a rectangle ends inside a block without being the tensor's last, the next one starts there.
            if local % block or (first + inside) % block or (length % block and inside + length != whole):
                raise SlimxError(
                    f"plan: a shard of {name}, {move.rows} x {move.cols} at row {sum(row)}, column {sum(col)}, is not "
                    f"made of whole quantisation blocks of {high} x {wide}; head_dim, the experts' inner size / ETP "
                    f"and every other shard must be multiples of {block}",
                    code="plan.blocks",
                    about=name,
                )

    def _place(self, part: Part, rank: int) -> tuple[int, int]:
        """Bucket and index of `part` on `rank`; its scales, if any, follow it."""
        quantisation = self.precision.quantisation if part.quantised else None
        if quantisation:
            names = [part.name + suffix for suffix in quantisation.suffixes]
            dtypes = quantisation.code_dtype, quantisation.scale_dtype
            forms = list(zip(names, dtypes, quantisation.shapes(part.shape), (-1, 0), strict=True))
        else:
            forms = [(part.name, part.dtype or self.precision.engine, part.shape, -1)]
        offset, need = _align(self.ends[rank]), 0
        for _, form, shape, _ in forms:
            need = _align(need) + _nbytes(shape, form)
        buckets = self.tensors[rank]
        if buckets[-1] and offset + need > self.bucket_bytes:
            buckets.append([])
            offset = 0
        first = len(buckets[-1])
        for name, form, shape, scale_of in forms:
            nbytes = _nbytes(shape, form)
            index = first if scale_of == 0 else -1
            buckets[-1].append(BucketTensor(name, form, tuple(shape), offset, nbytes, index, part.column))
            self.ends[rank] = offset + nbytes
            offset = _align(self.ends[rank])
        return len(buckets) - 1, first


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _end(tensors: list[BucketTensor]) -> int:
    return tensors[-1].offset + tensors[-1].nbytes if tensors else 0


def _nbytes(shape: Iterable[int], dtype: str) -> int:
    rows, cols = matrix(tuple(shape))
    return rows * cols * ITEMSIZE[dtype]
