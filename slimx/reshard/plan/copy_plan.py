"""Compiles a plan: which rectangle of which trainer rank's tensor is copied where. Only shapes are needed.

A plan relates two layouts of the same checkpoint tensors (`slimx.layout`). The target is the checkpoint itself, in
Hugging Face names (`slimx.layout.parts`), or the fused tensors of each engine rank, which then receives only its own
bytes. Every target element is checked to be written exactly once. The same inputs give the same plan on every
machine."""

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
from slimx.reshard.plan.intersect import Move, check_blocks, moves

FORMAT = 2
"""Version of the format that `Plan.to_bytes` writes."""
MOVES = 2**22
"""Maximum number of moves in a plan: 10 times as many as any configuration in configs/moe needs."""
ALIGNMENT = 64
"""Size of a cache line in bytes; each tensor starts at a multiple of it, so that views in every dtype are aligned."""

MOVE = np.dtype(
    [
        ("source", np.int32),  # trainer rank that has the elements and sends them
        ("parameter", np.int32),  # index into Plan.parameters
        ("target", np.int32),  # target rank that receives them
        ("bucket", np.int32),
        ("tensor", np.int32),  # index into Plan.buckets[target][bucket].tensors
        ("source_row", np.int32),
        ("source_col", np.int32),
        ("source_step", np.int32),  # rows of the parameter from one source row to the next
        ("row", np.int32),
        ("col", np.int32),
        ("row_step", np.int32),
        ("rows", np.int32),
        ("cols", np.int32),
    ]
)


class BucketTensor(msgspec.Struct, frozen=True):
    """Location of one tensor in its bucket. Tensors of quantized weights come in pairs: codes, then block scales."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor's first byte from the start of the bucket."""
    nbytes: int
    scale_of: int = -1
    """Index, within the bucket, of the tensor of codes to which these block scales belong; -1 if the tensor contains no
    scales."""
    column: bool = False
    """True if moves address the tensor as a matrix with a single column, regardless of its shape (`Part.column`)."""

    @property
    def width(self) -> int:
        """Number of columns when moves address the tensor as a matrix."""
        return 1 if self.column else matrix(self.shape)[1]


class Bucket(msgspec.Struct, frozen=True):
    """Tensors sent together to one target rank. `size`: bytes from the first tensor's start to the last one's end."""

    tensors: tuple[BucketTensor, ...]
    size: int


class Parameter(msgspec.Struct, frozen=True):
    """Tensor on trainer ranks from which moves read, identified by its parameter name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Holders(NamedTuple):
    """Trainer ranks from which each move of a plan could read, because they have the same bytes."""

    groups: list[tuple[int, ...]]
    """Distinct groups of trainer ranks that have the same bytes."""
    of: np.ndarray
    """Index into `groups` for each move, [moves]."""


class Plan:
    """Compiled plan: the moves from trainer ranks to buckets, and the buckets' tensors (`compile_plan`)."""

    def __init__(
        self,
        precision: Precision,
        parameters: list[Parameter],
        buckets: list[list[Bucket]],
        moved: np.ndarray,
        unread: tuple[str, ...] = (),
        holders: Holders | None = None,
    ):
        """Stores a compiled plan.

        `buckets[target][bucket]`: every target has the same number of buckets, of which the last ones may be empty.
        `moved`: moves sorted by bucket, then by source rank, [moves] of `MOVE`. `unread`: checkpoint tensors of the
        source that no target loads. `holders`: ranks that could send each move; None in a plan that was read from
        bytes."""
        self.precision = precision
        self.parameters = parameters
        self.buckets = buckets
        self.moved = moved
        self.unread = unread
        self.holders = holders

    @property
    def targets(self) -> int:
        return len(self.buckets)

    @property
    def count(self) -> int:
        """Number of buckets, which is the same for every target."""
        return len(self.buckets[0])

    def moves_of(self, source: int, bucket: int) -> np.ndarray:
        """Returns the moves that read from rank `source` and write to `bucket`, for all targets, [n] of `MOVE`."""
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
        """Distinct dtypes of target tensors, and the index into them for each move's target tensor, [moves]."""
        names: dict[str, int] = {}
        of_target: dict[int, list[list[int]]] = {}  # an engine's replicas may share one list of buckets
        lengths: list[int] = []
        flat: list[int] = []
        for target in self.buckets:
            if id(target) not in of_target:
                of_target[id(target)] = []
                for b in target:
                    of_target[id(target)].append([names.setdefault(t.dtype, len(names)) for t in b.tensors])
            for indices in of_target[id(target)]:
                lengths.append(len(indices))
                flat.extend(indices)
        first = np.cumsum([0, *lengths])
        bucket = self.moved["target"].astype(np.int64) * self.count + self.moved["bucket"]
        return list(names), np.array(flat, dtype=np.int8)[first[bucket] + self.moved["tensor"]]

    @property
    def launches(self) -> int:
        """Maximum number of kernel launches per rank and publication: one per bucket to which the rank contributes."""
        return max(Counter(source for _, source in self._slices).values(), default=0)

    def to_bytes(self) -> bytes:
        """Returns the plan encoded as bytes, without `holders`; equal plans give equal bytes."""
        head = (self.precision, self.parameters, self.buckets, self.unread)
        return msgspec.msgpack.encode((FORMAT, msgspec.to_builtins(head), self.moved.tobytes()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """Returns the plan that `to_bytes` encoded. Raises SlimxError if the bytes do not encode a plan or have another
        format version."""
        try:
            version, head, moved = msgspec.msgpack.decode(data)
            if version != FORMAT:
                raise SlimxError(
                    f"the copy plan has format {version}, but this release of slimx reads only format {FORMAT}; "
                    "compile the plan again"
                )
            kinds = tuple[Precision, list[Parameter], list[list[Bucket]], tuple[str, ...]]
            precision, parameters, buckets, unread = msgspec.convert(head, kinds, strict=False)
            return cls(precision, parameters, buckets, np.frombuffer(moved, dtype=MOVE), unread)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise SlimxError(
                f"a copy plan of {len(data)} bytes cannot be decoded ({error}); compile the plan again"
            ) from error


def compile_plan(
    source: Iterable[Part], target: Iterable[Part], *, precision: Precision, bucket_bytes: int, ranks: int = 1
) -> Plan:
    """Returns the plan that fills every tensor of `target`, on `ranks` target ranks, from the tensors of `source`.

    `bucket_bytes`: maximum size of a bucket per target; a larger tensor is alone in its bucket. If several source ranks
    have the same bytes, the rank with the least data to send sends them. Raises SlimxError naming a tensor that the
    source lacks, one that occurs twice for a rank, or a shard that splits a quantization block."""
    return _Compiler(source, precision, bucket_bytes, ranks).compile(target)


class _Compiler:
    def __init__(self, source: Iterable[Part], precision: Precision, bucket_bytes: int, ranks: int):
        self.precision = precision
        self.bucket_bytes = bucket_bytes
        self.parameters: list[Parameter] = []
        self.parameter_indices: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self.holders: list[tuple[int, tuple[int, ...]]] = []
        """For each source part: index of its parameter in `parameters`, and the ranks that have it."""
        self.sources: dict[str, tuple[list[Rect], list[int]]] = {}
        """Checkpoint tensor -> its rectangles in source parts, and the index in `holders` of each rectangle's part."""
        for part in source:
            if not part.copy:
                self._add_source(part)
        geometries: dict[tuple[Rect, ...], int] = {}
        self.geometry_of: dict[str, int] = {}
        for name, (rects, _) in self.sources.items():
            self.geometry_of[name] = geometries.setdefault(tuple(rects), len(geometries))
        self.met: dict[tuple[int, ...], tuple[Move, ...]] = {}
        self.checked: set[tuple[tuple[int, ...], tuple[Rect, ...], bool]] = set()
        last_rank = max((max(ranks_of_part) for _, ranks_of_part in self.holders), default=0)
        self.load = np.zeros(1 + last_rank, dtype=np.int64)
        self.indices: dict[int, np.ndarray] = {}
        self.tensors: list[list[list[BucketTensor]]] = [[[]] for _ in range(ranks)]
        self.ends = [0] * ranks
        self.placed: list[set[str]] = [set() for _ in range(ranks)]
        """Target rank -> names of the tensors placed for it so far."""
        self.rows: list[tuple[int, ...]] = []
        self.groups: dict[tuple[int, ...], int] = {}
        self.group_of: list[int] = []
        """For each move in `rows`: index in `groups` of the group of ranks that could send it."""
        self.read: set[str] = set()

    def compile(self, target: Iterable[Part]) -> Plan:
        for part in target:
            self._add_target(part)
        moved = np.array(self.rows, dtype=MOVE)
        order = np.lexsort((moved["tensor"], moved["target"], moved["source"], moved["bucket"]))
        count = max(len(per_rank) for per_rank in self.tensors)
        buckets: list[list[Bucket]] = []
        for per_rank in self.tensors:
            empty = [Bucket((), 0)] * (count - len(per_rank))
            buckets.append([Bucket(tuple(tensors), _end(tensors)) for tensors in per_rank] + empty)
        unread = tuple(name for name in self.sources if name not in self.read)
        holders = Holders(list(self.groups), np.array(self.group_of, dtype=np.int32)[order])
        return Plan(self.precision, self.parameters, buckets, moved[order], unread, holders)

    def _add_source(self, part: Part) -> None:
        dtype = part.dtype or self.precision.trainer
        index = self.parameter_indices.setdefault((part.name, dtype, part.shape), len(self.parameters))
        if index == len(self.parameters):
            self.parameters.append(Parameter(part.name, dtype, part.shape))
        self.holders.append((index, part.ranks))
        for rect in part.rects:
            rects, parts = self.sources.setdefault(part.sources[rect.source], ([], []))
            rects.append(rect)
            parts.append(len(self.holders) - 1)

    def _add_target(self, part: Part) -> None:
        self._check_filled(part)
        copies = []
        for rect in part.rects:
            name = part.sources[rect.source]
            if name not in self.sources:
                raise SlimxError(
                    f"{part.name} needs checkpoint tensor {name}, which no trainer rank has; correct the sources of "
                    f"{part.name} in the weight table",
                    code="plan.unheld",
                    about=name,
                )
            self.read.add(name)
            parts = self.sources[name][1]
            for move in self._meet(name, rect, part.quantized):
                copies.append((parts[move.source], move, rect))
        itemsize = ITEMSIZE[part.dtype or self.precision.trainer]
        if len(self.rows) + len(copies) * len(part.ranks) > MOVES:
            raise SlimxError(
                f"the copy plan for {len(self.ends)} target ranks exceeds the limit of {MOVES} copies at "
                f"{part.name}; raise rollout.engines.expert, or lower rollout.engines.tensor or "
                "trainer.expert_tensor, to split experts less",
                code="plan.moves",
                about=part.name,
            )
        for rank in part.ranks:
            if rank >= len(self.ends):
                raise SlimxError(
                    f"{part.name} is for target rank {rank}, but the copy plan has only {len(self.ends)} ranks; "
                    "raise `ranks` of compile_plan",
                    code="plan.rank",
                    about=part.name,
                )
            if part.name in self.placed[rank]:
                raise SlimxError(
                    f"{part.name} occurs twice for target rank {rank}; remove one of its rows from the weight table",
                    code="plan.twice",
                    about=part.name,
                )
            self.placed[rank].add(part.name)
            bucket, tensor = self._place(part, rank)
            for source_part, m, rect in copies:
                parameter, ranks = self.holders[source_part]
                sender = self._least_busy(ranks)
                self.load[sender] += m.rows * m.cols * itemsize
                source = m.source_row, m.source_col, m.source_step
                target = rect.local_row + m.row, rect.local_col + m.col, m.row_step
                self.group_of.append(self.groups.setdefault(ranks, len(self.groups)))
                self.rows.append((sender, parameter, rank, bucket, tensor, *source, *target, m.rows, m.cols))

    def _least_busy(self, ranks: tuple[int, ...]) -> int:
        """Returns the rank in `ranks` that has been assigned the least data to send so far; the first such rank if
        there are several."""
        if len(ranks) == 1:
            return ranks[0]
        if id(ranks) not in self.indices:  # parts share their tuple of ranks, which `holders` keeps alive
            self.indices[id(ranks)] = np.array(ranks)
        return ranks[int(self.load[self.indices[id(ranks)]].argmin())]

    def _check_filled(self, part: Part) -> None:
        """Raises SlimxError unless each element of the target tensor, except for padding, is in exactly one
        rectangle."""
        key = part.matrix, part.rects, part.padded
        if key not in self.checked:
            boxes = [(r.local_row, r.local_col, r.rows, r.cols) for r in part.rects]
            array = np.array(boxes, dtype=np.int64).reshape(-1, 4)
            check_boxes(part.name, part.matrix, array, padded=part.padded)
            self.checked.add(key)

    def _meet(self, name: str, rect: Rect, quantized: bool) -> tuple[Move, ...]:
        """Returns the moves that fill `rect`; their target rows and columns are relative to the first element of
        `rect`. Cached, because experts in a stack have the same moves at different positions."""
        quantization = self.precision.quantization if quantized else None
        high, wide = (1, 1) if quantization is None else quantization.block
        position = rect.row, rect.col, rect.rows, rect.cols, rect.step, rect.local_row % high, rect.local_col % wide
        key = self.geometry_of[name], *position, quantization is not None
        if key not in self.met:
            block_moves = moves(self.sources[name][0], rect._replace(local_row=0, local_col=0), name)
            if quantization is not None:
                for move in block_moves:
                    check_blocks(name, move, rect, quantization.block)
            self.met[key] = block_moves
        return self.met[key]

    def _place(self, part: Part, rank: int) -> tuple[int, int]:
        """Adds `part`, and its scales if quantized, to a bucket of `rank`; returns the bucket's index and the tensor's
        index in it."""
        quantization = self.precision.quantization if part.quantized else None
        if quantization:
            codes, scales = quantization.shapes(part.shape)
            code_suffix, scale_suffix = quantization.suffixes
            specs = [
                (part.name + code_suffix, quantization.code_dtype, codes),
                (part.name + scale_suffix, quantization.scale_dtype, scales),
            ]
        else:
            specs = [(part.name, part.dtype or self.precision.engine, part.shape)]
        offset = _align(self.ends[rank])
        needed = 0
        for _, dtype, shape in specs:
            needed = _align(needed) + _nbytes(shape, dtype)
        buckets = self.tensors[rank]
        if buckets[-1] and offset + needed > self.bucket_bytes:
            buckets.append([])
            offset = 0
        first = len(buckets[-1])
        for index, (name, dtype, shape) in enumerate(specs):
            nbytes = _nbytes(shape, dtype)
            scale_of = first if index == 1 else -1
            buckets[-1].append(BucketTensor(name, dtype, tuple(shape), offset, nbytes, scale_of, part.column))
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
