"""Bytes that moves send over the network: values in the engine's dtype, and the block scales of quantized ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slimx.layout.number_formats import ITEMSIZE
from slimx.reshard.plan.copy_plan import Plan


class WireBytes(NamedTuple):
    """Bytes that trainer ranks send to engine ranks, for each pair that communicates."""

    sources: np.ndarray
    targets: np.ndarray
    nbytes: np.ndarray

    def sent(self, ranks: int) -> np.ndarray:
        """Returns the bytes [ranks] sent by each trainer rank."""
        return summed((ranks,), (self.sources,), self.nbytes)

    def received(self, ranks: int) -> np.ndarray:
        """Returns the bytes [ranks] received by each target rank."""
        return summed((ranks,), (self.targets,), self.nbytes)


def wire_bytes(plan: Plan) -> WireBytes:
    """Returns the bytes that each trainer rank sends each target rank in a publication by `plan`."""
    moved = plan.moved
    pairs, pair = np.unique(moved["source"].astype(np.int64) * plan.targets + moved["target"], return_inverse=True)
    return WireBytes(*divmod(pairs, plan.targets), summed((len(pairs),), (pair,), move_bytes(plan)))


def move_bytes(plan: Plan) -> np.ndarray:
    """Returns the bytes [moves] of each move of `plan`."""
    moved = plan.moved
    names, dtype = plan.dtypes
    nbytes = moved["rows"].astype(np.int64) * moved["cols"] * np.array([ITEMSIZE[name] for name in names])[dtype]
    quantization = plan.precision.quantization
    if quantization is not None:
        high, wide = quantization.block
        blocks = -(-moved["rows"].astype(np.int64) // high) * -(-moved["cols"] // wide)
        codes_and_scales = nbytes // quantization.per_code + blocks * ITEMSIZE[quantization.scale_dtype]
        nbytes = np.where(quantized_moves(plan), codes_and_scales, nbytes)
    return nbytes


def quantized_moves(plan: Plan) -> np.ndarray:
    """Returns booleans [moves]: True for a move whose values are quantized when sent."""
    quantization = plan.precision.quantization
    if quantization is None:
        return np.zeros(len(plan.moved), dtype=bool)
    names, dtype = plan.dtypes
    return np.array([name == quantization.code_dtype for name in names])[dtype]


def summed(shape: tuple[int, ...], index: tuple[np.ndarray, ...], values: np.ndarray) -> np.ndarray:
    """Returns sums [shape] of `values` by their `index` on each axis."""
    flat = np.bincount(np.ravel_multi_index(index, shape), weights=values, minlength=int(np.prod(shape)))
    return flat.reshape(shape).astype(np.int64)  # exact: float64 counts bytes up to 2^53
