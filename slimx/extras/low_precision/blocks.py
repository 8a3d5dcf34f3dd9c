"""Converts one tensor to and from block fp8, with the kernel that publications use."""

from __future__ import annotations

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.record import OP, PIECE, RULE, element_bytes

_CODES = torch.float8_e4m3fn, torch.uint8


def quantize(
    values: torch.Tensor, rule: RULE, block: tuple[int, int], *, threads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `values` [rows, cols], which are contiguous and bf16 or fp32, to e4m3. Returns the codes, uint8 [rows,
    cols], and the scales of their blocks. `block`: rows and columns of a block; `threads`: None for torch's number of
    threads.

    The scales have shape [ceil(rows / block[0]), ceil(cols / block[1])]. They are fp32, or E8M0 exponents (uint8) under
    rule MXFP8; `rule` determines their values (docs/numerics.md). All values of a block with a non-finite value become
    NaN.
    """
    rows, cols = values.shape
    size = element_bytes("values for fp8 blocks", values, torch.bfloat16, torch.float32)
    mx = rule == RULE.MXFP8
    shape = (-(-rows // block[0]), -(-cols // block[1]))
    scale_size = 1 if mx else 4
    start = -(-rows * cols // 4) * 4  # aligned to the four bytes of a scale
    bucket = torch.empty(start + shape[0] * shape[1] * scale_size, dtype=torch.uint8)
    piece = np.zeros(1, dtype=PIECE)
    piece["src"] = values.data_ptr()
    piece["src_ld"] = values.stride(0) * size
    piece["src_step"] = size
    piece["dst_ld"] = cols
    piece["pos_ld"] = cols
    piece["rows"] = rows
    piece["cols"] = cols
    piece["scale"] = start
    piece["scale_ld"] = shape[1] * scale_size
    piece["scale_pos_ld"] = shape[1] * scale_size
    piece["scale_tensor"] = 1
    piece["block_rows"] = block[0]
    piece["block_cols"] = block[1]
    piece["op"] = OP.QUANTIZE_MXFP8 if mx else OP.QUANTIZE_FP8
    piece["rule"] = rule
    piece["item"] = size
    piece["out"] = 1
    kernel.pack(piece, bucket, np.zeros(2, dtype=np.uint64), np.zeros(2, dtype=np.uint32), threads=threads)
    scales = bucket[start:] if mx else bucket[start:].view(torch.float32)
    return bucket[: rows * cols].view(rows, cols), scales.view(shape)


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    threads: int | None = None,
) -> torch.Tensor:
    """Returns e4m3 `codes` [rows, cols] times the scales of their blocks, in `dtype`. Both may have an additional first
    dimension n, for a stack of n matrices. `block`: rows and columns of a block.

    `scales` [ceil(rows / block[0]), ceil(cols / block[1])] are fp32, or E8M0 exponents (uint8) for blocks of 1 x 32.
    The product is computed in fp32 and rounded once (docs/numerics.md: DEQUANTIZE_FP8); non-finite values stay
    non-finite. `threads`: None for torch's number of threads.
    """
    out = torch.empty(codes.shape, dtype=dtype)
    if codes.dim() != 3:
        codes = codes[None]
    if scales.dim() != 3:
        scales = scales[None]
    count, rows, cols = codes.shape
    element_bytes("codes of fp8 blocks", codes, *_CODES)
    size = element_bytes("values of fp8 blocks", out, torch.bfloat16, torch.float32)
    shape = count, -(-rows // block[0]), -(-cols // block[1])
    mx = block == (1, 32)
    scales_dtype = torch.uint8 if mx else torch.float32
    fits = scales.shape == shape and scales.dtype == scales_dtype
    if not fits or (shape[2] > 1 and scales.stride(2) != 1):
        raise SlimxError(
            f"scales of dtype {scales.dtype}, shape {list(scales.shape)} and strides {scales.stride()} do not fit "
            f"codes of shape {list(codes.shape)} in blocks of {block[0]} x {block[1]}; pass contiguous scales of dtype "
            f"{scales_dtype} and shape {list(shape)}",
            code="kernel.scales",
            about="scales",
        )
    piece = np.zeros(count, dtype=PIECE)
    index = np.arange(count)
    piece["src"] = codes.data_ptr() + index * codes.stride(0)
    piece["src_ld"] = codes.stride(1)
    piece["src_step"] = codes.stride(2)
    piece["scale"] = scales.data_ptr() + index * scales.stride(0) * scales.element_size()
    piece["scale_ld"] = scales.stride(1) * scales.element_size()
    piece["scale_tensor"] = -1
    piece["dst"] = piece["pos"] = index * rows * cols * size
    piece["dst_ld"] = cols * size
    piece["pos_ld"] = cols * size
    piece["rows"] = rows
    piece["cols"] = cols
    piece["block_rows"] = block[0]
    piece["block_cols"] = block[1]
    piece["op"] = OP.DEQUANTIZE_MXFP8 if mx else OP.DEQUANTIZE_FP8
    piece["rule"] = RULE.NONE
    piece["item"] = 1
    piece["out"] = size
    bucket = out.view(-1).view(torch.uint8)
    flags = np.zeros(1, dtype=np.uint32)
    kernel.pack(piece, bucket, np.zeros(1, dtype=np.uint64), flags, threads=threads)
    return out
