"""What the reshard kernels compute, in torch and numpy: slow and obvious. This is the specification that tests hold
them to; `csrc/reshard.h` and `csrc/numerics.h` say why it is so.

The checksum of a tensor of n bytes is seed(n) + sum over its 32-bit little-endian words w_i of w_i * multiplier(i), mod
2^64, where the last word is padded with zero bytes.
"""

import ctypes

import numpy as np
import torch

from slimx.reshard.kernels.record import NONFINITE, OP, RULE, scale_bytes

MASK = 2**64 - 1
E4M3_MAX = 448.0
NAN_E4M3, NAN_E8M0 = 0x7F, 0xFF

# Elements -----------------------------------------------------------------------------------------------------------


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, to nearest even; every NaN becomes 0x7FC0."""
    return torch.where(x.isnan(), 0x7FC0, x.bfloat16().view(torch.int16)).view(torch.bfloat16)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 to e4m3 codes, uint8 of the same shape: to nearest even, saturating; every NaN becomes 0x7F.

    Clamped first: torch before 2.13 casts what lies above 464 to NaN.
    """
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), NAN_E4M3, codes)


def from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 codes (uint8) to fp32, exactly."""
    return codes.view(torch.float8_e4m3fn).float()


def from_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """E8M0 exponents e (uint8) to fp32: 2^(e - 127), and NaN for 255."""
    return torch.where(exponents == NAN_E8M0, torch.nan, _power_of_two(exponents.int().clamp(max=254) - 127))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent, fp32, exactly (torch's exp2 and pow promise only an ulp)."""
    return torch.from_numpy(np.asarray(np.ldexp(np.float32(1), exponent.numpy()), dtype=np.float32))


def _ceil_log2(x: torch.Tensor) -> torch.Tensor:
    """The smallest integer e with x <= 2^e, for x > 0."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, 1/2 <= mantissa < 1
    return exponent - (mantissa == 0.5).int()


def _divide(a: float | torch.Tensor, b: float | torch.Tensor) -> torch.Tensor:
    """a / b in fp32, rounded once: with one Python number torch may multiply by a reciprocal instead."""
    a, b = torch.broadcast_tensors(torch.as_tensor(a, dtype=torch.float32), torch.as_tensor(b, dtype=torch.float32))
    return torch.div(a.contiguous(), b.contiguous())


# Block scales: amax [...] fp32, finite -> (what is written, what elements are multiplied by, whether codes are doubled)


def scales_ieee(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """s = max(amax, 1e-10) / 448 and 1 / s, each division rounded to nearest."""
    s = _divide(amax.clamp(min=1e-10), E4M3_MAX)
    return s, _divide(1.0, s), torch.zeros_like(s, dtype=torch.bool)


def scales_triton(amax: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with a GPU's approximate division: looked up by the bits of amax, a bf16, in `table` [32640, 2]."""
    s, inverse = table[amax.bfloat16().view(torch.int16).long()].unbind(-1)
    return s, inverse, torch.zeros_like(s, dtype=torch.bool)


def scales_te(amax: torch.Tensor, source: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Transformer Engine: r = 448 / amax, at most the source dtype's largest number, 1 where amax is 0; s = 1 / r."""
    ratio = _divide(E4M3_MAX, amax)
    r = torch.where(ratio.isinf(), torch.finfo(source).max, ratio)
    r = torch.where(amax == 0, 1.0, r)
    return _divide(1.0, r), r, torch.zeros_like(r, dtype=torch.bool)


def scales_ue8m0(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """s = 2^ceil(log2(max(amax, 1e-4) / 448)), at its fixed point.

    Where who dequantized these codes and quantized them again would get another scale (the largest code is 224, so half
    the scale would do), that half is written with doubled codes.
    """

    def once(amax: torch.Tensor) -> torch.Tensor:
        return _power_of_two(_ceil_log2(_divide(amax.clamp(min=1e-4), E4M3_MAX)))

    s = once(amax)
    dequantized = from_e4m3(to_e4m3(amax * _divide(1.0, s))) * s  # infinite within a rounding of fp32's end
    again = torch.where(dequantized.isinf(), s, once(dequantized))
    return again, _divide(1.0, s), again != s


def scales_mxfp8(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E8M0: e = 127 + ceil(log2(amax * (1 / 448))), uint8, 0 from 2^-127 down; and 2^(127 - e)."""
    x = amax * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32)
    e = torch.where(x > 0, 127 + _ceil_log2(x), 0).clamp(min=0)
    return e.to(torch.uint8), _power_of_two(127 - e)


# Blocks -------------------------------------------------------------------------------------------------------------


def _spread(per_block: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """[block rows, block cols] -> [rows, cols]: each block's value at all its elements."""
    wide = per_block.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block [block rows, block cols] of x [rows, cols]; NaN or infinite if one is."""
    (rows, cols), (high, wide) = x.shape, block
    padded = torch.nn.functional.pad(x, (0, -cols % wide, 0, -rows % high))
    return padded.abs().view(-(-rows // high), high, -(-cols // wide), wide).amax((1, 3))


def quantize(
    x: torch.Tensor, rule: RULE, block: tuple[int, int], table: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, cols] bf16 or fp32 -> e4m3 codes [rows, cols] uint8 and scales [block rows, block cols].

    Scales are fp32, or uint8 exponents by MXFP8. A block with an element that is not finite is NaN throughout.
    `table`: for the rule TRITON.
    """
    amax = block_amax(x.float(), block)
    poisoned = ~amax.isfinite()
    amax = torch.where(poisoned, 0.0, amax)
    if rule == RULE.MXFP8:
        scales, inverse = scales_mxfp8(amax)
        doubled = torch.zeros_like(poisoned)
        scales = torch.where(poisoned, NAN_E8M0, scales)
    else:
        if rule == RULE.IEEE:
            scales, inverse, doubled = scales_ieee(amax)
        elif rule == RULE.TRITON:
            scales, inverse, doubled = scales_triton(amax, table)
        elif rule == RULE.TE:
            scales, inverse, doubled = scales_te(amax, x.dtype)
        else:
            scales, inverse, doubled = scales_ue8m0(amax)
        scales = torch.where(poisoned, torch.nan, scales)
    codes = to_e4m3(x.float() * _spread(inverse, block, x.shape))
    twice = to_e4m3(from_e4m3(codes) * 2.0)
    codes = torch.where(_spread(doubled, block, x.shape), twice, codes)
    return torch.where(_spread(poisoned, block, x.shape), NAN_E4M3, codes), scales


def quantize_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, cols] bf16 or fp32 -> codes [rows, cols / 2] uint8, two in a byte, and bf16 scales [rows, cols / 32].

    A group with an element, or a value, that is not finite has a scale of NaN and the codes of 0.
    """
    x = to_bf16(x.float())
    amax = block_amax(x.float(), (1, 32))
    s = to_bf16(_divide(amax, 7.0))
    poisoned = ~amax.isfinite() | ~to_bf16(s.float() * 7.0).isfinite()
    s = torch.where(s.float() < 2.0**-126, 2.0**-7, s.float())
    q = to_bf16(_divide(x.float(), _spread(s, (1, 32), x.shape))).float().clamp(-8, 7).round() + 8
    codes = torch.where(_spread(poisoned, (1, 32), x.shape), 8, q).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, to_bf16(torch.where(poisoned, torch.nan, s))


def dequantize(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Codes [rows, cols] uint8 times their blocks' scales (fp32, or uint8 exponents), in fp32, then to `dtype`."""
    s = from_e8m0(scales) if scales.dtype == torch.uint8 else scales
    x = from_e4m3(codes) * _spread(s, block, codes.shape)
    x = torch.where(x.isnan(), torch.nan, x)
    return to_bf16(x) if dtype == torch.bfloat16 else x


# Checksums ----------------------------------------------------------------------------------------------------------


def multipliers(words: np.ndarray) -> np.ndarray:
    """The odd 32-bit multiplier of each word index, as uint64; any shape."""
    i = words.astype(np.uint64).astype(np.uint32)
    x = i * np.uint32(0x0BD794D6) + np.uint32(0xC2B2AE35)
    x = (x ^ (x >> np.uint32(16))) | np.uint32(1)
    x = x * np.uint32(0x9E3779B1)
    return ((x ^ (x >> np.uint32(15))) | np.uint32(1)).astype(np.uint64)


def seed(nbytes: int) -> int:
    """A tensor's size mixed into 64 bits: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (nbytes + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def tensor_bytes(t: torch.Tensor) -> np.ndarray:
    """The bytes [n] uint8 of a tensor in row-major order, whatever its strides."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(t: torch.Tensor) -> int:
    """The definition: whole words of the whole tensor."""
    data = tensor_bytes(t)
    words = np.pad(data, (0, -len(data) % 4)).view("<u4").astype(np.uint64)
    total = (words * multipliers(np.arange(len(words)))).sum(dtype=np.uint64)
    return (seed(len(data)) + int(total)) & MASK


def share(data: np.ndarray, pos: int) -> int:
    """What the bytes `data` [n] uint8 at offset `pos` of their tensor add to its checksum: each on its own."""
    at = pos + np.arange(len(data))
    in_place = data.astype(np.uint64) << (8 * (at % 4)).astype(np.uint64)
    return int((in_place * multipliers(at // 4)).sum(dtype=np.uint64))


def checksum_rects(pieces: np.ndarray, sums: np.ndarray) -> None:
    """Adds the share of the source bytes of `pieces` [n] of `PIECE`, as they are, to `sums` [tensors] uint64."""
    for p in pieces:
        if p["rows"] and p["cols"]:
            _add(_elements(p), p, ("pos", "pos_ld", "tensor"), sums)


# Pieces -------------------------------------------------------------------------------------------------------------


def pack(
    pieces: np.ndarray,
    bucket: torch.Tensor,
    sums: np.ndarray,
    flags: np.ndarray,
    table: torch.Tensor | None = None,
) -> None:
    """What `kernel.pack` does, one piece after another. `table`: for the rule TRITON."""
    for p in pieces:
        if not p["rows"] or not p["cols"]:
            continue
        values, scales, finite = _do(p, table)
        flags[p["tensor"]] |= 0 if finite else NONFINITE
        for data, place in (
            (values, ("dst", "dst_ld", "pos", "pos_ld", "tensor")),
            (scales, ("scale", "scale_ld", "scale_pos", "scale_pos_ld", "scale_tensor")),
        ):
            if data is None:
                continue
            for r, row in enumerate(data):
                start = int(p[place[0]]) + r * int(p[place[1]])
                bucket.numpy()[start : start + len(row)] = row
            _add(data, p, place[2:], sums)


def _do(p: np.void, table: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray | None, bool]:
    """The bytes of the values [rows, bytes] that a piece writes, those of its scales if any, whether all is finite."""
    source, block = _elements(p), (int(p["block_rows"]), int(p["block_cols"]))
    if p["op"] == OP.COPY:
        return source, None, True
    dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
    x, scales = torch.from_numpy(source).view(dtype[int(p["item"])]), None
    if p["op"] == OP.QUANTIZE_INT4:
        out, scales = quantize_int4(x)
        finite = scales.isfinite().all()
    elif p["op"] in (OP.QUANTIZE_FP8, OP.QUANTIZE_MXFP8):
        finite = x.isfinite().all()
        out, scales = quantize(x, RULE(p["rule"]), block, table)
    else:
        if p["op"] == OP.FP32_TO_BF16:
            out = to_bf16(x)
        elif p["op"] == OP.BF16_TO_FP32:
            out = (x.view(torch.int16).int() << 16).view(torch.float32)  # a NaN keeps its bits
        elif p["op"] == OP.COPY_CHECKED:
            out = x
        else:
            out = dequantize(x, _scales_of(p), block, dtype[int(p["out"])])
        finite = out.isfinite().all()
    return _rows(out), None if scales is None else _rows(scales), bool(finite)


def _scales_of(p: np.void) -> torch.Tensor:
    """The scales [block rows, block cols] that a dequantizing piece reads."""
    size = int(scale_bytes(np.array([p]))[0])
    down, across = (-(-int(p[n]) // int(p[b])) for n, b in (("rows", "block_rows"), ("cols", "block_cols")))
    data = _bytes_at(int(p["scale"]), (down, across), (int(p["scale_ld"]), size), size)
    return torch.from_numpy(data).view(torch.float32 if size == 4 else torch.uint8)


def _elements(p: np.void) -> np.ndarray:
    shape, steps = (int(p["rows"]), int(p["cols"])), (int(p["src_ld"]), int(p["src_step"]))
    return _bytes_at(int(p["src"]), shape, steps, int(p["item"]))


def _bytes_at(address: int, shape: tuple[int, int], steps: tuple[int, int], item: int) -> np.ndarray:
    """A copy [rows, cols * item] uint8 of elements of `item` bytes that stand `steps` bytes apart."""
    span = (shape[0] - 1) * steps[0] + (shape[1] - 1) * steps[1] + item
    memory = np.frombuffer(ctypes.string_at(address, span), dtype=np.uint8)
    apart = np.lib.stride_tricks.as_strided(memory, (*shape, item), (*steps, 1))
    return apart.reshape(shape[0], shape[1] * item).copy()


def _rows(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy()


def _add(data: np.ndarray, p: np.void, place: tuple[str, str, str], sums: np.ndarray) -> None:
    pos, ld, tensor = (int(p[name]) for name in place)
    for r, row in enumerate(data):
        sums[tensor] = (int(sums[tensor]) + share(row, pos + r * ld)) & MASK
