"""Plans that go through every case of a rounding rather than random ones."""

from __future__ import annotations

import numpy as np

from slimx.reshard.kernels.record import OP, PIECE, RULE
from tests.gpu.plans import MARGIN, Plan

AMAX = 0x7F80
"""Finite bf16 magnitudes, as bits."""


def matrix_plan(op: OP, rule: RULE, elements: np.ndarray, block: tuple[int, int]) -> Plan:
    """One piece that quantizes `elements` [rows, cols], bits of bf16 (uint16) or fp32 (uint32)."""
    rows, cols = elements.shape
    size, item = {OP.QUANTIZE_MXFP8: 1, OP.QUANTIZE_INT4: 2}.get(op, 4), elements.itemsize
    scale, width = MARGIN + -(-rows * cols // 16) * 16, -(-cols // block[1]) * size
    line = cols // 2 if op == OP.QUANTIZE_INT4 else cols
    piece = np.zeros(1, dtype=PIECE)
    piece["src_ld"], piece["src_step"], piece["item"], piece["out"] = cols * item, item, item, 1
    piece["dst"], piece["dst_ld"], piece["pos_ld"] = MARGIN, line, line
    piece["rows"], piece["cols"], piece["op"], piece["rule"] = rows, cols, op, rule
    piece["scale"], piece["scale_ld"], piece["scale_pos_ld"] = scale, width, width
    piece["block_rows"], piece["block_cols"], piece["scale_tensor"] = *block, 1
    memory = np.ascontiguousarray(elements).view(np.uint8).reshape(-1)
    return Plan(piece, memory, scale + -(-rows // block[0]) * width + MARGIN, 2)


def one_block_per_amax(op: OP, rule: RULE) -> Plan:
    """A block for every finite bf16 amax: the amax itself among smaller elements of both signs."""
    block = (16, 8) if op == OP.QUANTIZE_FP8 else (1, 32)
    count = block[0] * block[1]
    rng = np.random.default_rng(0)
    share = rng.random((AMAX, count)) * np.where(rng.random((AMAX, count)) < 0.5, -1, 1)
    bits = np.arange(AMAX, dtype=np.uint32)[:, None] << 16
    x = (bits.view(np.float32) * share).astype(np.float32).view(np.uint32) >> 16  # towards zero: below amax
    x[np.arange(AMAX), rng.integers(0, count, AMAX)] = bits[:, 0] >> 16
    return matrix_plan(op, rule, x.astype(np.uint16).reshape(-1, block[1]), block)
