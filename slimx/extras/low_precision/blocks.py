"""One tensor into blocks of fp8 and out of them, by the kernel of a publication."""

from __future__ import annotations

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.record import OP, PIECE, RULE, element_bytes

_CODES = torch.float8_e4m3fn, torch.uint8


def quantise(
    values: torch.Tensor, rule: RULE, block: tuple[int, int], *, threads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes (uint8) of `values` [rows, cols], bf16 or fp32 and contiguous, and the scales of their blocks.

    The scales [rows / block[0], cols / block[1]], both rounded up, are fp32, or E8M0 exponents (uint8) by MXFP8; `rule`
    says how they are chosen (docs/numerics.md). A block that is not finite is NaN throughout.
    """
    rows, cols = values.shape
    size = element_bytes("values for fp8 blocks", values, torch.bfloat16, torch.float32)
    mx = rule == RULE.MXFP8
    shape, wide = (-(-rows // block[0]), -(-cols // block[1])), 1 if mx else 4
    start = -(-rows * cols // 4) * 4  # where scales of four bytes may lie
    bucket = torch.empty(start + shape[0] * shape[1] * wide, dtype=torch.uint8)
    piece = np.zeros(1, dtype=PIECE)
    piece["src"], piece["src_ld"], piece["src_step"] = values.data_ptr(), values.stride(0) * size, size
    piece["dst_ld"], piece["pos_ld"] = cols, cols
    piece["rows"], piece["cols"] = rows, cols
    piece["scale"], piece["scale_ld"], piece["scale_pos_ld"] = start, shape[1] * wide, shape[1] * wide
    piece["scale_tensor"] = 1
    piece["block_rows"], piece["block_cols"] = block
    piece["op"], piece["rule"] = OP.QUANTISE_MXFP8 if mx else OP.QUANTISE_FP8, rule
    piece["item"], piece["out"] = size, 1
    kernel.pack(piece, bucket, np.zeros(2, dtype=np.uint64), np.zeros(2, dtype=np.uint32), threads=threads)
    scales = bucket[start:] if mx else bucket[start:].view(torch.float32)
    return bucket[: rows * cols].view(rows, cols), scales.view(shape)


def dequantise(
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    threads: int | None = None,
) -> torch.Tensor:
    """e4m3 `codes` [rows, cols] times the scales of their blocks -> [rows, cols] of `dtype`; so for each matrix of a
    stack [n, rows, cols] with its scales.

    `scales` [rows / block[0], cols / block[1]], both rounded up: fp32, or E8M0 exponents (uint8). The product is fp32
    and rounded once (docs/numerics.md: DEQUANTISE_FP8); what is not finite stays so. `threads`: torch's number of
    threads unless given.
    """
    out = torch.empty(codes.shape, dtype=dtype)
    codes, scales = (part if part.dim() == 3 else part[None] for part in (codes, scales))
    count, rows, cols = codes.shape
    element_bytes("codes of fp8 blocks", codes, *_CODES)
    size = element_bytes("values of fp8 blocks", out, torch.bfloat16, torch.float32)
    shape = count, -(-rows // block[0]), -(-cols // block[1])
    mx = block == (1, 32)
    if (
        scales.shape != shape
        or scales.dtype != (torch.uint8 if mx else torch.float32)
        or (shape[2] > 1 and scales.stride(2) != 1)
    ):
        raise SlimxError(
            f"scales {scales.dtype} {list(scales.shape)} are not those of codes {list(codes.shape)} in blocks of "
            f"{block[0]} x {block[1]}: pass {'uint8' if mx else 'fp32'} {list(shape)}",
            code="kernel.scales",
            about="scales",
        )
    piece, number = np.zeros(count, dtype=PIECE), np.arange(count)
    piece["src"] = codes.data_ptr() + number * codes.stride(0)
    piece["src_ld"], piece["src_step"] = codes.stride(1), codes.stride(2)
    piece["scale"] = scales.data_ptr() + number * scales.stride(0) * scales.element_size()
    piece["scale_ld"] = scales.stride(1) * scales.element_size()
    piece["scale_tensor"] = -1
    piece["dst"] = piece["pos"] = number * rows * cols * size
    piece["dst_ld"], piece["pos_ld"] = cols * size, cols * size
    piece["rows"], piece["cols"] = rows, cols
    piece["block_rows"], piece["block_cols"] = block
    piece["op"], piece["rule"] = OP.DEQUANTISE_MXFP8 if mx else OP.DEQUANTISE_FP8, RULE.NONE
    piece["item"], piece["out"] = 1, size
    bucket, flags = out.view(-1).view(torch.uint8), np.zeros(1, dtype=np.uint32)
    kernel.pack(piece, bucket, np.zeros(1, dtype=np.uint64), flags, threads=threads)
    return out
