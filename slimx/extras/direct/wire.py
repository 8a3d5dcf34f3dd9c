"""Counts the bytes that a plan's moves send over the network: values in the engine's dtype, and block scales if they
are quantized."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slimx.layout.number_formats import ITEMSIZE
from slimx.reshard.plan.copy_plan import Plan


class WireBytes(NamedTuple):
    """Numbers of bytes sent from trainer ranks to target ranks: `nbytes[i]` from `sources[i]` to `targets[i]`, with one
    entry per pair that communicates."""

    sources: np.ndarray
    targets: np.ndarray
    nbytes: np.ndarray

    def sent(self, ranks: int) -> np.ndarray:
        """Returns the number of bytes that each trainer rank sends, [ranks]. `ranks`: number of trainer ranks."""
        return summed((ranks,), (self.sources,), self.nbytes)

    def received(self, ranks: int) -> np.ndarray:
        """Returns the number of bytes that each target rank receives, [ranks]. `ranks`: number of target ranks."""
        return summed((ranks,), (self.targets,), self.nbytes)


def wire_bytes(plan: Plan) -> WireBytes:
    """Returns the number of bytes that each trainer rank sends to each target rank in one publication that follows
    `plan`."""
    moved = plan.moved
    pairs, pair = np.unique(moved["source"].astype(np.int64) * plan.targets + moved["target"], return_inverse=True)
    return WireBytes(*divmod(pairs, plan.targets), summed((len(pairs),), (pair,), move_bytes(plan)))


def move_bytes(plan: Plan) -> np.ndarray:
    """Returns the number of bytes that each move of `plan` sends, [moves], block scales included."""
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
    """Returns a mask, bool [moves], of the moves of `plan` whose values are quantized before they are sent."""
    quantization = plan.precision.quantization
    if quantization is None:
        return np.zeros(len(plan.moved), dtype=bool)
    names, dtype = plan.dtypes
    return np.array([name == quantization.code_dtype for name in names])[dtype]


def summed(shape: tuple[int, ...], index: tuple[np.ndarray, ...], values: np.ndarray) -> np.ndarray:
    """Returns an array of `shape` in which `values` are summed by position. `index`: position of each value, as one
    array per axis."""
    flat = np.bincount(np.ravel_multi_index(index, shape), weights=values, minlength=int(np.prod(shape)))
    return flat.reshape(shape).astype(np.int64)  # exact, because float64 represents integers up to 2^53
