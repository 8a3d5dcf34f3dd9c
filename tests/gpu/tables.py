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


def every_rounding(item: int) -> Plan:
    """Elements in blocks whose scale is 1: all e4m3 ties, their neighbours, denormals, and random bits up to 448."""
    rng = np.random.default_rng(0)
    if item == 2:
        bits = np.arange(1 << 16, dtype=np.uint32)
        bits = bits[(bits & 0x7FFF) <= 0x43E0] << 16
    else:
        ends = np.arange(0x7F)  # the codes as numbers: 8 for every exponent, subnormals below
        exact = np.where(ends < 8, ends / 512, (1 + ends % 8 / 8) * 2.0 ** (ends // 8 - 7)).astype(np.float32)
        ties = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(np.float32)
        near = np.concatenate([exact, ties]).view(np.uint32)
        near = (near[:, None].astype(np.int64) + np.arange(-3, 4)).clip(0, 0x43E00000).reshape(-1).astype(np.uint32)
        some = rng.integers(0, 0x43E00001, 1 << 21, dtype=np.uint32)
        bits = np.concatenate([near, near | 0x80000000, some, some | 0x80000000])
    block = 128 * 128
    bits = np.concatenate([bits, np.zeros(-(-len(bits) // (block - 1)) * (block - 1) - len(bits), np.uint32)])
    top = np.full((len(bits) // (block - 1), 1), 0x43E00000, np.uint32)  # 448: the scale of the block is 1
    blocks = np.concatenate([top, bits.reshape(len(top), -1)], axis=1).reshape(-1, 128)
    elements = (blocks >> 16).astype(np.uint16) if item == 2 else blocks
    return matrix_plan(OP.QUANTIZE_FP8, RULE.IEEE, elements, (128, 128))
