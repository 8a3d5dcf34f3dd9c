"""The publication plan: which tensors travel in which bucket, and which bytes each rank contributes.

Computed from shapes alone, the same on every rank. A bucket holds whole Hugging Face tensors one after another; every
rank contributes its rectangles in one contiguous run of bytes, so that a bucket costs one collective.
"""

from __future__ import annotations

from dataclasses import dataclass

from slimx.layout.ranks import Coordinates, Sizes, coordinates
from slimx.layout.table import Rect, Table, check_coverage, matrix

ALIGNMENT = 64
"""Bytes: tensors start on a cache line, so that the receiver's views are aligned for every dtype."""


@dataclass(frozen=True, slots=True)
class BucketTensor:
    """One tensor's place in its bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together; `size` in bytes."""

    tensors: tuple[BucketTensor, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Part:
    """One rectangle that a rank contributes: from a local parameter, through `at` in its run of bytes, into a
    tensor."""

    parameter: str
    rect: Rect
    tensor: int
    """Index in the bucket."""
    at: int
    """Byte offset in the rank's contribution."""


def make_buckets(table: Table, itemsize: int, bucket_bytes: int) -> list[Bucket]:
    """Tensors in checkpoint order, a new bucket wherever the next one would exceed `bucket_bytes`.

    A tensor larger than a bucket travels alone.
    """
    buckets: list[Bucket] = []
    tensors: list[BucketTensor] = []
    end = 0
    for name, shape in table.checkpoint().items():
        rows, cols = matrix(shape)
        nbytes = rows * cols * itemsize
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if tensors and offset + nbytes > bucket_bytes:
            buckets.append(Bucket(tuple(tensors), end))
            tensors, offset = [], 0
        tensors.append(BucketTensor(name, shape, offset, nbytes))
        end = offset + nbytes
    buckets.append(Bucket(tuple(tensors), end))
    return buckets


class Contributions:
    """Who contributes what to each bucket, for every rank of a layout. Coverage is proven once, on construction."""

    def __init__(self, table: Table, sizes: Sizes, buckets: list[Bucket], itemsize: int):
        places = [coordinates(rank, sizes) for rank in range(sizes.world)]
        check_coverage(table, sizes, places)
        where = {t.name: (b, i) for b, bucket in enumerate(buckets) for i, t in enumerate(bucket.tensors)}
        self.parts: list[list[list[Part]]] = []
        """[rank][bucket]: that rank's parts, in order."""
        self.nbytes: list[list[int]] = []
        """[rank][bucket]: bytes of that rank's contribution."""
        for place in places:
            parts, ends = self._of(table, sizes, place, where, len(buckets), itemsize)
            self.parts.append(parts)
            self.nbytes.append(ends)

    @staticmethod
    def _of(
        table: Table,
        sizes: Sizes,
        place: Coordinates,
        where: dict[str, tuple[int, int]],
        count: int,
        itemsize: int,
    ) -> tuple[list[list[Part]], list[int]]:
        parts: list[list[Part]] = [[] for _ in range(count)]
        ends = [0] * count
        for held in table.held_by(place, sizes):
            if not held.owner:
                continue
            for rect in held.rects:
                bucket, tensor = where[held.sources[rect.source][0]]
                parts[bucket].append(Part(held.name, rect, tensor, ends[bucket]))
                ends[bucket] += rect.rows * rect.cols * itemsize
        return parts, ends
