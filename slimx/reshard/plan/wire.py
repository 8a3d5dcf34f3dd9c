"""Bytes that moves put on the wire: values in the engine's dtype, and the block scales of what is quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from slimx.reshard.plan.copy_plan import BucketTensor, Plan
from slimx.reshard.plan.precision import ITEMSIZE


class WireBytes(NamedTuple):
    """Bytes that trainer ranks send engine ranks: a number for each pair that has anything to send."""

    sources: np.ndarray
    targets: np.ndarray
    nbytes: np.ndarray

    def sent(self, ranks: int) -> np.ndarray:
        """[ranks] bytes that leave each trainer rank."""
        return summed((ranks,), (self.sources,), self.nbytes)

    def received(self, ranks: int) -> np.ndarray:
        """[ranks] bytes that enter each target rank."""
        return summed((ranks,), (self.targets,), self.nbytes)


def wire_bytes(plan: Plan) -> WireBytes:
    """Bytes that each trainer rank sends each target rank in a publication by `plan`."""
    moved = plan.moved
    pairs, pair = np.unique(moved["source"].astype(np.int64) * plan.targets + moved["target"], return_inverse=True)
    return WireBytes(*divmod(pairs, plan.targets), summed((len(pairs),), (pair,), move_bytes(plan)))


def move_bytes(plan: Plan) -> np.ndarray:
    """Bytes [moves] of each move of `plan`."""
    moved = plan.moved
    nbytes = moved["rows"].astype(np.int64) * moved["cols"] * _by_move(plan, lambda t: ITEMSIZE[t.dtype])
    if (quantisation := plan.precision.quantisation) is not None:
        high, wide = quantisation.block
        blocks = -(-moved["rows"].astype(np.int64) // high) * -(-moved["cols"] // wide)
        nbytes += np.where(quantised_moves(plan), blocks * ITEMSIZE[quantisation.scale_dtype], 0)
    return nbytes


def quantised_moves(plan: Plan) -> np.ndarray:
    """Booleans [moves]: True for a move whose values are quantised on their way."""
    if plan.precision.quantisation is None:
        return np.zeros(len(plan.moved), dtype=bool)
    return _by_move(plan, lambda t: t.dtype == "float8_e4m3fn").astype(bool)


def _by_move(plan: Plan, value: Callable[[BucketTensor], int]) -> np.ndarray:
    """[moves] `value` of the tensor that each move fills."""
    held = [[[value(t) for t in bucket.tensors] for bucket in target] for target in plan.buckets]
    first = np.cumsum([0] + [len(bucket) for target in held for bucket in target])
    flat = np.array([one for target in held for bucket in target for one in bucket], dtype=np.int64)
    moved = plan.moved
    return flat[first[moved["target"].astype(np.int64) * plan.count + moved["bucket"]] + moved["tensor"]]


def summed(shape: tuple[int, ...], index: tuple[np.ndarray, ...], values: np.ndarray) -> np.ndarray:
    """Sums [shape] of `values` by their `index` on each axis."""
    flat = np.bincount(np.ravel_multi_index(index, shape), weights=values, minlength=int(np.prod(shape)))
    return flat.reshape(shape).astype(np.int64)  # exact: float64 counts bytes up to 2^53
