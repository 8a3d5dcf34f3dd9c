"""The publication plan: which tensors travel in which bucket, and which bytes each rank contributes.

Computed from shapes alone, the same on every rank. A bucket holds whole Hugging Face tensors one after another; every
rank contributes its rectangles in one contiguous run of bytes, so that a bucket costs one collective.
"""

from __future__ import annotations

from dataclasses import dataclass

from slimx.layout.maps import Rect
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage, matrix
from slimx.layout.ranks import Sizes
from slimx.layout.table import Table

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
        layout = MegatronLayout(table, sizes)
        check_coverage(table.checkpoint(), layout.parts())
        where = {t.name: (b, i) for b, bucket in enumerate(buckets) for i, t in enumerate(bucket.tensors)}
        self.parts: list[list[list[Part]]] = [[[] for _ in buckets] for _ in range(sizes.world)]
        """[rank][bucket]: that rank's parts, in order."""
        self.nbytes: list[list[int]] = [[0] * len(buckets) for _ in range(sizes.world)]
        """[rank][bucket]: bytes of that rank's contribution."""
        for held in layout.parts():
            if held.copy:
                continue
            rank = held.ranks[0]
            for rect in held.rects:
                bucket, tensor = where[held.sources[rect.source]]
                self.parts[rank][bucket].append(Part(held.name, rect, tensor, self.nbytes[rank][bucket]))
                self.nbytes[rank][bucket] += rect.rows * rect.cols * itemsize
