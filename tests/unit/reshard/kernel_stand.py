"""Random plans for the reshard kernels: tensors of every op, cut into rectangles that lie in memory in every way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.record import OP, PIECE, QUANTIZES, RULE
from tests import reshard_reference as reference

FP8_RULES = [RULE.IEEE, RULE.TE, RULE.UE8M0, RULE.TRITON]
DTYPE = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """NaN payloads and all."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    rows = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return rows.view(dtype)


def random_weights(shape: tuple[int, int], dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """Normal numbers, denormals and zeros of very different sizes from place to place; all finite."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    size = torch.tensor([rng.choice([0.0, 1e-40, 1e-12, 1e-6, 0.02, 1.0, 300.0, 1e30]) for _ in range(shape[0])])
    return (torch.randn(shape, generator=generator) * size[:, None]).to(dtype)


def all_bf16() -> torch.Tensor:
    """Every bf16 [65536], in the order of its bits."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def some_triton_scales() -> torch.Tensor:
    """A table [32640, 2] of the form that a GPU writes: the divisions of IEEE, off by a last bit here and there."""
    s, inverse, _ = reference.scales_ieee(all_bf16()[:0x7F80].float())
    bits = torch.stack([s, inverse], dim=1).view(torch.int32)
    return (
        bits + torch.randint(-1, 2, bits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ).view(torch.float32)


def bits(t: torch.Tensor) -> np.ndarray:
    return reference.tensor_bytes(t)


# Rectangles in memory -------------------------------------------------------------------------------------------------


def split(rng: random.Random, rows: int, cols: int) -> list[tuple[slice, slice]]:
    """Random rectangles that cover [rows, cols], shuffled."""
    parts, todo = [], [(0, rows, 0, cols)]
    while todo:
        r0, r1, c0, c1 = todo.pop()
        if (r1 - r0) * (c1 - c0) <= 1 or rng.random() < 0.25:
            parts.append((slice(r0, r1), slice(c0, c1)))
        elif (rng.random() < 0.5 and r1 - r0 > 1) or c1 - c0 == 1:
            cut = rng.randrange(r0 + 1, r1)
            todo += [(r0, cut, c0, c1), (cut, r1, c0, c1)]
        else:
            cut = rng.randrange(c0 + 1, c1)
            todo += [(r0, r1, c0, cut), (r0, r1, cut, c1)]
    rng.shuffle(parts)
    return parts


def laid_out(part: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same values as a view into a larger buffer: rows apart, or transposed, or with gaps between elements."""
    rows, cols = part.shape
    start, gap, wide = rng.randrange(5), rng.randrange(5), rng.choice([1, 1, 1, 2, 3])
    strides = (max(cols, 1) * wide + gap, wide) if rng.random() < 0.7 else (wide, max(rows, 1) * wide + gap)
    memory = torch.zeros(start + rows * strides[0] + cols * strides[1] + 1, dtype=part.dtype)
    view = memory.as_strided((rows, cols), strides, start)
    view.copy_(part)
    return view


# Plans ----------------------------------------------------------------------------------------------------------------


@dataclass
class Tensor:
    """One destination tensor: `source` [rows, cols] whole, and what becomes of it."""

    op: OP
    source: torch.Tensor
    out: torch.dtype
    rule: RULE = RULE.NONE
    block: tuple[int, int] = (0, 0)
    scales: torch.Tensor | None = None
    """Scales of a dequantizing op [block rows, block cols]."""

    @property
    def quantizes(self) -> bool:
        return self.op in QUANTIZES

    @property
    def scale_shape(self) -> tuple[int, int]:
        rows, cols = self.source.shape
        return -(-rows // self.block[0]), -(-cols // self.block[1])

    @property
    def scale_size(self) -> int:
        return {OP.QUANTIZE_MXFP8: 1, OP.DEQUANTIZE_MXFP8: 1, OP.QUANTIZE_INT4: 2}.get(self.op, 4)

    def width(self, cols: int) -> int:
        """Bytes of `cols` elements where they are written."""
        return (cols // 2 if self.op == OP.QUANTIZE_INT4 else cols) * self.out.itemsize

    def expected(self, table: torch.Tensor) -> list[np.ndarray]:
        """The bytes of the whole tensor, and of its scales if it has any, by the reference."""
        if self.op == OP.QUANTIZE_INT4:
            return [bits(part) for part in reference.quantize_int4(self.source)]
        if self.quantizes:
            return [bits(part) for part in reference.quantize(self.source, self.rule, self.block, table)]
        if self.op in (OP.DEQUANTIZE_FP8, OP.DEQUANTIZE_MXFP8):
            return [bits(reference.dequantize(self.source, self.scales, self.block, self.out))]
        if self.op == OP.FP32_TO_BF16:
            return [bits(reference.to_bf16(self.source))]
        return [bits(self.source.float() if self.op == OP.BF16_TO_FP32 else self.source)]


@dataclass
class Plan:
    """Pieces of several tensors, and where each lies in the bucket."""

    pieces: np.ndarray
    nbytes: int
    """Of the bucket."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """(offset, bytes) of each tensor and each scale tensor, in the order of `sums`."""
    memory: list[torch.Tensor] = field(default_factory=list)
    """The sources, alive."""

    def sums(self) -> np.ndarray:
        return kernel.seeds([nbytes for _, nbytes in self.places])


def plan(tensors: list[Tensor], rng: random.Random, *, whole: bool = False) -> Plan:
    """Shuffled pieces of all tensors. `whole`: one piece for each tensor, from its own memory."""
    out, end, records = Plan(np.zeros(0, PIECE), 0), 64, []
    for t in tensors:
        rows, cols = t.source.shape
        high, wide = t.block if t.block[0] else (1, 1)
        index, line = len(out.places), t.width(cols)
        dst, end = end, end + -(-rows * line // 4) * 4 + 4 * rng.randrange(4)
        out.places.append((dst, rows * line))
        scale_dst = end
        if t.quantizes:
            down, across = t.scale_shape
            end += -(-down * across * t.scale_size // 4) * 4
            out.places.append((scale_dst, down * across * t.scale_size))
        units = split(rng, -(-rows // high), -(-cols // wide)) if rows * cols and not whole else [(slice(0, rows),) * 2]
        for down, across in units:
            r, c = (0, 0) if whole else (down.start * high, across.start * wide)
            part = t.source if whole else t.source[r : down.stop * high, c : across.stop * wide]
            view = part if whole else laid_out(part, rng)
            out.memory.append(view)
            place, scale_row = r * line + t.width(c), (t.scale_shape[1] if t.block[0] else 0) * t.scale_size
            record = np.zeros((), PIECE)
            record["src"], record["item"] = view.data_ptr(), view.element_size()
            record["src_ld"], record["src_step"] = (stride * view.element_size() for stride in view.stride())
            record["dst"], record["pos"], record["dst_ld"], record["pos_ld"] = dst + place, place, line, line
            record["rows"], record["cols"] = view.shape
            record["tensor"], record["scale_tensor"] = index, index + 1 if t.quantizes else -1
            record["block_rows"], record["block_cols"] = t.block
            record["op"], record["rule"], record["out"] = t.op, t.rule, t.out.itemsize
            if t.block[0]:
                at = r // high * scale_row + c // wide * t.scale_size
                record["scale_ld"] = record["scale_pos_ld"] = scale_row
                record["scale"], record["scale_pos"] = (scale_dst if t.quantizes else t.scales.data_ptr()) + at, at
            records.append(record)
    rng.shuffle(records)
    out.pieces, out.nbytes = np.array(records, dtype=PIECE), end + 64
    return out
