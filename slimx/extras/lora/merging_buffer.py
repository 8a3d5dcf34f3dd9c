"""Computes the size of the buffer in which trainer ranks merge weights with their adapters before a bucket is
packed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slimx.layout.number_formats import ITEMSIZE
from slimx.reshard.plan.copy_plan import Plan

ALIGN = 64
"""Alignment in bytes of each weight in the merging buffer."""


def merging_buffer_bytes(plan: Plan, merges: Callable[[str], bool]) -> dict[int, int]:
    """Returns {trainer rank: size in bytes of its merging buffer}. The buffer must have room for the weights of one
    bucket at a time; ranks that merge nothing are omitted.

    `merges`: returns True for the name of a parameter that is merged before it is packed."""
    padded = []
    for parameter in plan.parameters:
        nbytes = ITEMSIZE[parameter.dtype] * int(np.prod(parameter.shape, dtype=np.int64))
        padded.append(-(-nbytes // ALIGN) * ALIGN if merges(parameter.name) else 0)
    sizes = np.array(padded, dtype=np.int64)
    moved = plan.moved[sizes[plan.moved["parameter"]] > 0]
    read = np.unique(np.stack([moved[key].astype(np.int64) for key in ("source", "bucket", "parameter")]), axis=1)
    out: dict[int, int] = {}
    if not read.size:
        return out
    buckets, inverse = np.unique(read[:2], axis=1, return_inverse=True)
    bucket_sizes = np.bincount(inverse.ravel(), weights=sizes[read[2]])
    for rank, nbytes in zip(buckets[0].tolist(), bucket_sizes.tolist(), strict=True):
        out[rank] = max(out.get(rank, 0), int(nbytes))
    return out
