"""Random plans of every op, rule and element size for the kernels: aligned and not, split, strided, transposed, odd.

A plan's sources lie in one block of memory, so that the same plan runs on any device that holds a copy of the block.
"""

from dataclasses import dataclass

import numpy as np

from slimx.reshard.kernels.record import DEQUANTIZES, OP, PIECE, QUANTIZES, RULE

FORMS = [  # op, rule, bytes of a source element, of a destination element
    *((OP.COPY, RULE.NONE, size, size) for size in (1, 2, 3, 4, 8)),
    (OP.COPY_CHECKED, RULE.NONE, 2, 2),
    (OP.COPY_CHECKED, RULE.NONE, 4, 4),
    (OP.FP32_TO_BF16, RULE.NONE, 4, 2),
    (OP.BF16_TO_FP32, RULE.NONE, 2, 4),
    *((OP.QUANTIZE_FP8, rule, size, 1) for rule in (RULE.IEEE, RULE.TE, RULE.UE8M0) for size in (2, 4)),
    *((OP.QUANTIZE_MXFP8, RULE.MXFP8, size, 1) for size in (2, 4)),
    *((OP.QUANTIZE_INT4, RULE.INT4, size, 1) for size in (2, 4)),
    *((OP.DEQUANTIZE_FP8, RULE.NONE, 1, size) for size in (2, 4)),
    *((OP.DEQUANTIZE_MXFP8, RULE.NONE, 1, size) for size in (2, 4)),
]
TRITON = (OP.QUANTIZE_FP8, RULE.TRITON, 2, 1)
BLOCKS = [(128, 128), (128, 128), (1, 128), (64, 32), (16, 40), (3, 5), (200, 256)]
MARGIN = 64
"""Bytes of a bucket around each tensor that nothing may write."""


@dataclass(frozen=True)
class Plan:
    """Pieces whose addresses count from the start of `memory` [bytes] uint8; see `at`."""

    pieces: np.ndarray
    memory: np.ndarray
    bucket_bytes: int
    tensors: int

    def at(self, address: int) -> np.ndarray:
        """Returns the pieces for a copy of `memory` that lies at `address`, a multiple of 16."""
        placed = self.pieces.copy()
        placed["src"] += np.uint64(address)
        reads = np.isin(placed["op"], DEQUANTIZES)
        placed["scale"][reads] += np.uint64(address)
        return placed


class _Memory:
    """Rectangles laid one after another, with gaps of random bytes."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.parts, self.end = rng, [], 0

    def add(self, data: np.ndarray, alignment: int) -> int:
        """Adds `data` [n] uint8; returns its offset."""
        start = -(-self.end // alignment) * alignment
        self.parts.append((start, data))
        self.end = start + len(data) + int(self.rng.integers(0, 3))
        return start

    def bytes(self) -> np.ndarray:
        whole = self.rng.integers(0, 256, self.end + 16, dtype=np.uint8)
        for start, data in self.parts:
            whole[start : start + len(data)] = data
        return whole


def random_plan(seed: int, forms: list[tuple[int, int, int, int]] = FORMS, tensors: int = 6, side: int = 300) -> Plan:
    """Returns a plan of `tensors` destination tensors of up to `side` rows and columns, randomly formed and split."""
    rng = np.random.default_rng(seed)
    memory, records, end, sums = _Memory(rng), [], 0, 0
    for _ in range(tensors):
        op, rule, item, out = forms[rng.integers(len(forms))]
        mx, int4 = op in (OP.QUANTIZE_MXFP8, OP.DEQUANTIZE_MXFP8), op == OP.QUANTIZE_INT4
        block = (0, 0)
        if mx or int4:
            block = (1, 32)
        elif op >= OP.QUANTIZE_FP8:
            block = BLOCKS[rng.integers(len(BLOCKS))]
        tidy = rng.random() < 0.6  # as real weights are: everything a multiple of 16 bytes
        rows, cols = (int(n) for n in rng.integers(0 if rng.random() < 0.1 else 1, side + 1, 2))
        if tidy:
            cols = -(-cols // 64) * 64
        elif int4:
            cols = -(-cols // 32) * 32
        per = 2 if int4 else 1  # columns in an element that is written
        alignment = _alignment(op, out, tidy)
        end = -(-(end + MARGIN) // alignment) * alignment
        dst, ld = end, cols // per * out
        end += rows * ld
        quantizes = op in QUANTIZES
        size = {OP.QUANTIZE_MXFP8: 1, OP.DEQUANTIZE_MXFP8: 1, OP.QUANTIZE_INT4: 2}.get(op, 4)  # bytes of a scale
        scale_dst, scale_ld = 0, 0
        if quantizes:
            scale_dst, scale_ld = -(-(end + MARGIN) // 4) * 4, -(-cols // block[1]) * size
            end = scale_dst + -(-rows // block[0]) * scale_ld
        cut = (max(block[0], 1), block[1] or (8 if tidy else 1))
        # Bytes of the tensor that are in other buckets.
        ahead = out * int(rng.integers(0, 5)) if rng.random() < 0.3 else 0
        for r0, r1, c0, c1 in _split(rng, rows, cols, cut):
            src, src_ld, src_step = _source(rng, memory, op, item, r1 - r0, c1 - c0, tidy)
            b = (r0 // block[0], c0 // block[1]) if block[0] else (0, 0)
            scale, ld_of_scales = scale_dst + b[0] * scale_ld + b[1] * size, scale_ld
            if op in DEQUANTIZES:
                scale, ld_of_scales = _scales(rng, memory, mx, -(-(r1 - r0) // block[0]), -(-(c1 - c0) // block[1]))
            pos = r0 * ld + c0 // per * out
            places = (src, src_ld, src_step, dst + pos, ld, ahead + pos, ld, r1 - r0, c1 - c0)
            of_scales = (scale, ld_of_scales, scale - scale_dst, scale_ld) if quantizes else (scale, ld_of_scales, 0, 0)
            if op < OP.QUANTIZE_FP8:
                of_scales = (0, 0, 0, 0)
            indices = (sums, sums + 1 if quantizes else -1, *block)
            records.append((*places, *of_scales, *indices, op, rule, item, out, 0))
        sums += 2 if quantizes else 1
    pieces = np.array(records, dtype=PIECE)
    rng.shuffle(pieces)
    return Plan(pieces, memory.bytes(), end + MARGIN, sums)


def _split(rng: np.random.Generator, rows: int, cols: int, cut: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Returns random rectangles that cover [rows, cols], whose inner edges are multiples of `cut`."""
    done, todo = [], [(0, rows, 0, cols)]
    while todo:
        r0, r1, c0, c1 = todo.pop()
        at = r0 + int(rng.integers(0, max(r1 - r0, 1))) // cut[0] * cut[0]
        by = c0 + int(rng.integers(0, max(c1 - c0, 1))) // cut[1] * cut[1]
        if rng.random() < 0.5:
            done.append((r0, r1, c0, c1))
        elif rng.random() < 0.5 and r0 < at < r1:
            todo += [(r0, at, c0, c1), (at, r1, c0, c1)]
        elif c0 < by < c1:
            todo += [(r0, r1, c0, by), (r0, r1, by, c1)]
        else:
            done.append((r0, r1, c0, c1))
    return done


def _alignment(op: int, item: int, tidy: bool) -> int:
    """Returns the alignment of a tensor in bytes; a copy that is not tidy may lie anywhere."""
    if tidy:
        return 16
    return 1 if op == OP.COPY else item


def _source(
    rng: np.random.Generator, memory: _Memory, op: int, item: int, rows: int, cols: int, tidy: bool
) -> tuple[int, int, int]:
    """Places a random rectangle; its offset, bytes between rows and bytes between elements."""
    elements = _elements(rng, op, item, rows * cols).reshape(rows, cols, item)
    alignment = _alignment(op, item, tidy)
    if rng.random() < 0.15:  # transposed: down its columns elements are neighbours
        between = rows * item + (0 if tidy else item * int(rng.integers(0, 3)))
        lines, line = elements.transpose(1, 0, 2).reshape(cols, rows * item), between
        steps = (item, between)
    else:
        gap = 16 * int(rng.integers(0, 2)) if tidy else item * int(rng.integers(0, 3))
        lines, line = elements.reshape(rows, cols * item), cols * item + gap
        steps = (line, item)
    stored = rng.integers(0, 256, (len(lines), line), dtype=np.uint8)
    stored[:, : lines.shape[1]] = lines
    return memory.add(stored.reshape(-1), alignment), *steps


def _elements(rng: np.random.Generator, op: int, item: int, count: int) -> np.ndarray:
    """Returns bytes [count, item]: numbers of many sizes where an op reads numbers, some of them not finite."""
    if item == 1 or op == OP.COPY:
        codes = rng.integers(0, 256, (count, item), dtype=np.uint8)
        return np.where(codes & 0x7F == 0x7F, 0, codes) if rng.random() < 0.5 else codes
    scale = np.float32(10.0) ** rng.integers(-42, 30)
    x = (rng.standard_normal(count) * scale).astype(np.float32) * (rng.random(count) < rng.choice([0, 0.5, 1, 1]))
    if rng.random() < 0.25:  # blocks whose largest code is 224 by UE8M0, which doubles them
        top = np.float32(1.78) * np.float32(2.0) ** rng.integers(-10, 30)
        x = np.where(rng.random(count) < 0.05, top, np.clip(x, -top, top)).astype(np.float32)
    bits = x.view(np.uint32) if item == 4 else (x.view(np.uint32) >> 16).astype(np.uint16)
    if rng.random() < 0.2 and count:
        strange = [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7F7F, 0xFF7F, 1, 0x8000]
        chosen = np.array(strange, dtype=np.uint32)[rng.integers(0, len(strange), 3)]
        bits[rng.integers(0, count, 3)] = (chosen << 16 | chosen >> 3) if item == 4 else chosen
    return bits.view(np.uint8).reshape(count, item)


def _scales(rng: np.random.Generator, memory: _Memory, mx: bool, rows: int, cols: int) -> tuple[int, int]:
    """Places random block scales; their offset and the bytes between their rows."""
    if mx:
        scales = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    else:
        scales = np.exp((rng.standard_normal((rows, cols)) * 20).clip(-80, 80)).astype(np.float32)
    width = cols * scales.itemsize
    return memory.add(scales.reshape(-1).view(np.uint8), 4), width
