"""Memory in which trainer ranks merge weights with their adapters before a bucket is packed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slimx.layout.number_formats import ITEMSIZE
from slimx.reshard.plan.copy_plan import Plan

ALIGN = 64
"""Bytes: of each weight's start."""


def merged_room(plan: Plan, merges: Callable[[str], bool]) -> dict[int, int]:
    """Bytes by trainer rank that the bucket with most of them needs; `merges`: of a parameter's name, whether it is
    read merged."""
    sizes = np.array(
        [
            -(-ITEMSIZE[p.dtype] * int(np.prod(p.shape, dtype=np.int64)) // ALIGN) * ALIGN if merges(p.name) else 0
            for p in plan.parameters
        ],
        dtype=np.int64,
    )
    moved = plan.moved[sizes[plan.moved["parameter"]] > 0]
    read = np.unique(np.stack([moved[key].astype(np.int64) for key in ("source", "bucket", "parameter")]), axis=1)
    out: dict[int, int] = {}
    if not read.size:
        return out
    buckets, inverse = np.unique(read[:2], axis=1, return_inverse=True)
    room = np.bincount(inverse.ravel(), weights=sizes[read[2]])
    for rank, nbytes in zip(buckets[0].tolist(), room.tolist(), strict=True):
        out[rank] = max(out.get(rank, 0), int(nbytes))
    return out
