"""Bytes that moves put on the wire: values in the engine's dtype, and the block scales of what is quantised."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slimx.layout.number_formats import ITEMSIZE
from slimx.reshard.plan.copy_plan import Plan


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
    names, dtype = plan.dtypes
    nbytes = moved["rows"].astype(np.int64) * moved["cols"] * np.array([ITEMSIZE[name] for name in names])[dtype]
    if (quantisation := plan.precision.quantisation) is not None:
        high, wide = quantisation.block
        blocks = -(-moved["rows"].astype(np.int64) // high) * -(-moved["cols"] // wide)
        codes_and_scales = nbytes // quantisation.per_code + blocks * ITEMSIZE[quantisation.scale_dtype]
        nbytes = np.where(quantised_moves(plan), codes_and_scales, nbytes)
    return nbytes


def quantised_moves(plan: Plan) -> np.ndarray:
    """Booleans [moves]: True for a move whose values are quantised on their way."""
    if (quantisation := plan.precision.quantisation) is None:
        return np.zeros(len(plan.moved), dtype=bool)
    names, dtype = plan.dtypes
    return np.array([name == quantisation.code_dtype for name in names])[dtype]


def summed(shape: tuple[int, ...], index: tuple[np.ndarray, ...], values: np.ndarray) -> np.ndarray:
    """Sums [shape] of `values` by their `index` on each axis."""
    flat = np.bincount(np.ravel_multi_index(index, shape), weights=values, minlength=int(np.prod(shape)))
    return flat.reshape(shape).astype(np.int64)  # exact: float64 counts bytes up to 2^53
