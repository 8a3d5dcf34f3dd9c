"""The record that the packing kernels read, as a numpy dtype, and checks of arrays of such records.

A record describes a piece: a rectangle of elements, the operation on it, and its position in its tensor and in the
bucket. It mirrors SlimxPiece in `csrc/reshard.h`."""

from enum import IntEnum
from itertools import product

import numpy as np
import torch

from slimx.errors import SlimxError


class OP(IntEnum):
    """Operation that a kernel performs on a piece's elements. All operations except COPY set the tensor's NONFINITE bit
    if they write an infinite or NaN value."""

    COPY = 0
    """Copies elements of any size, byte for byte, without checking for infinite and NaN values."""
    COPY_CHECKED = 1
    """Copies bf16 or fp32 elements unchanged; sets NONFINITE for infinite and NaN values."""
    FP32_TO_BF16 = 2
    """Rounds fp32 to the nearest bf16, ties to even; sets NONFINITE for infinite and NaN values and for values too
    large for bf16."""
    BF16_TO_FP32 = 3
    """Converts bf16 to fp32 exactly; sets NONFINITE for infinite and NaN values."""
    QUANTIZE_FP8 = 4
    """Quantizes bf16 or fp32 to e4m3 codes and fp32 block scales, by one of the rules in `RULE`. A block with an
    infinite or NaN value becomes NaN as a whole and sets NONFINITE."""
    QUANTIZE_MXFP8 = 5
    """Quantizes bf16 or fp32 like QUANTIZE_FP8, but with E8M0 scales (uint8) of 1 x 32 blocks."""
    DEQUANTIZE_FP8 = 6
    """Converts e4m3 codes and fp32 block scales to bf16 or fp32; sets NONFINITE for infinite and NaN results."""
    DEQUANTIZE_MXFP8 = 7
    """Converts e4m3 codes and E8M0 scales of 1 x 32 blocks to bf16 or fp32; sets NONFINITE for infinite and NaN
    results."""
    QUANTIZE_INT4 = 8
    """Quantizes bf16 or fp32 to INT4 codes, two per byte, with one bf16 scale per 1 x 32 block; all blocks must be
    complete. Sets NONFINITE for infinite and NaN values."""


class RULE(IntEnum):
    """Rule that a quantizing op follows to compute a block's scale from its largest magnitude (docs/numerics.md)."""

    NONE = 0
    IEEE = 1
    TRITON = 2
    TE = 3
    UE8M0 = 4
    MXFP8 = 5
    INT4 = 6


Problem = tuple[str, np.ndarray, str]
"""Error code, mask of the pieces that have the problem (bool [pieces]), and description of the problem."""
NONFINITE = 1
"""Bit of a tensor's flags that is set if a value written to the tensor is infinite or NaN."""

PIECE = np.dtype(
    [
        ("src", np.uint64),  # address of the first byte to read
        ("src_ld", np.int64),  # bytes from one source row to the next
        ("src_step", np.int64),  # bytes from one source element to the next: `item`, or more if it is transposed
        ("dst", np.uint64),  # byte offset in the bucket; checksum_rects ignores it
        ("dst_ld", np.int64),  # bytes from one row to the next in the bucket; checksum_rects ignores it
        ("pos", np.uint64),  # byte offset of the rectangle in the whole destination tensor
        ("pos_ld", np.int64),  # bytes from one row to the next in the whole destination tensor
        ("rows", np.int64),  # source rows
        ("cols", np.int64),  # source elements per row
        ("scale", np.uint64),  # first block's scale: byte offset in the bucket (quantize), or address (dequantize)
        ("scale_ld", np.int64),  # bytes from one row of scales to the next, in the bucket or at the address
        ("scale_pos", np.uint64),  # byte offset of the first block's scale in the whole scale tensor (quantize)
        ("scale_pos_ld", np.int64),  # bytes from one row to the next in the whole scale tensor (quantize)
        ("tensor", np.int32),  # index of the destination tensor in `sums` and `flags`
        ("scale_tensor", np.int32),  # index of the scale tensor in `sums` (quantize), -1 for other ops
        ("block_rows", np.int32),  # rows of a quantization block, 0 for ops without blocks
        ("block_cols", np.int32),  # its columns; a piece starts at a block, and only the tensor's edge may cut one
        ("op", np.uint8),  # OP
        ("rule", np.uint8),  # RULE, NONE for ops that do not quantize
        ("item", np.uint8),  # bytes of one source element
        ("out", np.uint8),  # bytes of one destination element; for INT4, of a byte with two codes
        ("reserved", np.uint32),  # must be 0
    ],
    align=True,
)
assert PIECE.itemsize == 128, "PIECE must have the size of SlimxPiece in csrc/reshard.h"

QUANTIZES = (OP.QUANTIZE_FP8, OP.QUANTIZE_MXFP8, OP.QUANTIZE_INT4)
DEQUANTIZES = (OP.DEQUANTIZE_FP8, OP.DEQUANTIZE_MXFP8)
_FORMS = {
    (OP.COPY_CHECKED, 2, 2),
    (OP.COPY_CHECKED, 4, 4),
    (OP.FP32_TO_BF16, 4, 2),
    (OP.BF16_TO_FP32, 2, 4),
    *product(QUANTIZES, (2, 4), (1,)),
    *product(DEQUANTIZES, (1,), (2, 4)),
}
"""Supported combinations (op, bytes of a source element, bytes of a destination element); COPY supports any size as
well."""
_RULES = {
    *((op, RULE.NONE) for op in OP if op not in QUANTIZES),
    (OP.QUANTIZE_FP8, RULE.IEEE),
    (OP.QUANTIZE_FP8, RULE.TRITON),
    (OP.QUANTIZE_FP8, RULE.TE),
    (OP.QUANTIZE_FP8, RULE.UE8M0),
    (OP.QUANTIZE_MXFP8, RULE.MXFP8),
    (OP.QUANTIZE_INT4, RULE.INT4),
}


def element_bytes(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> int:
    """Returns the number of bytes per element of `tensor`, which must have one of the `dtypes` that an op supports.

    The check is needed because a record contains only the element size: the kernels would read fp16 as bf16. Raises
    SlimxError for any other dtype; `name` identifies the tensor in the message."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise SlimxError(
            f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, but must have dtype {allowed}; "
            "convert the tensor",
            code="kernel.dtype",
            about=name,
        )
    return tensor.element_size()


def rectangle(
    view: torch.Tensor,
    *,
    tensor: int,
    pos: int,
    pos_ld: int,
    dst: int = 0,
    dst_ld: int | None = None,
    device: str = "cpu",
) -> tuple[int, ...]:
    """Returns the fields of one `PIECE` record that copies `view`, [rows, cols] or [cols] of any strides, a part of a
    tensor.

    `tensor`: index of the tensor in `sums`. `pos`, `pos_ld`: byte offset of the view's first element in the whole
    tensor, and bytes per row of that tensor. `dst`, `dst_ld`: the same in the bucket; `dst_ld` defaults to `pos_ld`.
    `device`: type of the device whose kernel reads the view, "cpu" or "cuda". The record does not keep `view` alive.
    Raises SlimxError if `view` is on another device or its elements overlap."""
    flat = view.unsqueeze(0) if view.dim() == 1 else view
    if flat.dim() != 2 or (flat.shape[1] > 1 and flat.stride(1) < 1) or flat.device.type != device:
        raise SlimxError(
            f"a view of shape {list(view.shape)} with strides {view.stride()} on {view.device} cannot be packed; pass "
            f"a 1-D or 2-D view of {device.upper()} memory whose elements do not overlap",
            code="kernel.view",
            about=str(list(view.shape)),
        )
    size = view.element_size()
    steps = (flat.stride(0) * size, max(flat.stride(1), 1) * size)
    position = (dst, pos_ld if dst_ld is None else dst_ld, pos, pos_ld, *flat.shape)
    no_scales = (0, 0, 0, 0)
    no_block = (0, 0)
    return (flat.data_ptr(), *steps, *position, *no_scales, tensor, -1, *no_block, OP.COPY, RULE.NONE, size, size, 0)


def scale_bytes(pieces: np.ndarray) -> np.ndarray:
    """Returns for each piece the size in bytes of one block scale, [pieces]; 0 if the piece's op has no scales."""
    op = pieces["op"]
    mx = np.isin(op, (OP.QUANTIZE_MXFP8, OP.DEQUANTIZE_MXFP8))
    return np.select([op < OP.QUANTIZE_FP8, mx, op == OP.QUANTIZE_INT4], [0, 1, 2], 4)


def written_cols(pieces: np.ndarray) -> np.ndarray:
    """Returns the number of elements that each piece writes per row, [pieces]; two INT4 columns are packed into one
    element."""
    return np.where(pieces["op"] == OP.QUANTIZE_INT4, pieces["cols"] // 2, pieces["cols"])


def check_sources(pieces: np.ndarray, sums: np.ndarray) -> None:
    """Raises SlimxError unless `pieces` is an array of `PIECE` with valid source fields, and `sums` an array of uint64
    with an element for every tensor index. Addresses are only checked not to be 0."""
    if pieces.dtype != PIECE or pieces.ndim != 1 or not pieces.flags.c_contiguous:
        raise SlimxError(
            f"pieces is an array of {pieces.dtype} with shape {pieces.shape}; pass a contiguous 1-D array of "
            "slimx.reshard.kernels.record.PIECE",
            code="kernel.pieces",
            about="pieces",
        )
    if sums.dtype != np.uint64 or sums.ndim != 1 or not sums.flags.carray:
        raise SlimxError(
            f"sums is an array of {sums.dtype} with shape {sums.shape}; pass a contiguous, writable 1-D array of "
            "uint64",
            code="kernel.sums",
            about="sums",
        )
    rows = pieces["rows"]
    cols = pieces["cols"]
    tensor = pieces["tensor"]
    item = pieces["item"].astype(np.int64)
    nonempty = (rows > 0) & (cols > 0)
    _refuse(
        pieces,
        ("kernel.extent", (rows < 0) | (cols < 0) | (pieces["src_ld"] < 0), "has negative rows, columns or row bytes"),
        ("kernel.item", item == 0, "has elements of 0 bytes"),
        ("kernel.sum", (tensor < 0) | (tensor >= len(sums)), f"has a tensor index outside the {len(sums)} sums"),
        ("kernel.source", nonempty & (pieces["src"] == 0), "has no source address"),
        ("kernel.source_overlap", nonempty & (cols > 1) & (pieces["src_step"] < item), "has overlapping elements"),
        ("kernel.reserved", pieces["reserved"] != 0, "has a value other than 0 in its reserved field"),
    )


def check_sums(pieces: np.ndarray) -> None:
    """Raises SlimxError if a row that a piece reads is longer than a row of the piece's tensor (`pos_ld`)."""
    _refuse(pieces, _too_long(pieces, pieces["cols"], pieces["item"]))


def check_ops(pieces: np.ndarray, sums: np.ndarray) -> None:
    """Raises SlimxError if a piece's op does not support its element sizes, rule, block, scales or alignment."""
    op = pieces["op"].astype(np.int64)
    rule = pieces["rule"].astype(np.int64)
    item = pieces["item"].astype(np.int64)
    out = pieces["out"].astype(np.int64)
    forms = np.isin(op << 16 | item << 8 | out, [o << 16 | i << 8 | d for o, i, d in _FORMS])
    forms |= (op == OP.COPY) & (item == out)
    rules = np.isin(op << 8 | rule, [o << 8 | r for o, r in _RULES])
    high = pieces["block_rows"]
    wide = pieces["block_cols"]
    blocks = op >= OP.QUANTIZE_FP8
    no_blocks = np.where(blocks, (high < 1) | (wide < 1), (high != 0) | (wide != 0))
    mx = scale_bytes(pieces) == 1
    int4 = op == OP.QUANTIZE_INT4
    quantizes = np.isin(op, QUANTIZES)
    target = pieces["scale_tensor"]
    no_sum = np.where(quantizes, (target < 0) | (target >= len(sums)), target != -1)
    triton_fp32 = (rule == RULE.TRITON) & (item == 4)
    reads = (blocks & ~quantizes) & (pieces["rows"] > 0) & (pieces["cols"] > 0)
    unaligned = (op != OP.COPY) & _unaligned(pieces, item, out)
    _refuse(
        pieces,
        ("kernel.form", ~forms, "has an op that does not support its element sizes"),
        ("kernel.rule", ~rules, "has a rule that its op does not support"),
        ("kernel.blocks", no_blocks, "has a block shape that its op does not support"),
        ("kernel.mxfp8_blocks", mx & ((high != 1) | (wide != 32)), "has an MXFP8 block shape other than 1 x 32"),
        ("kernel.int4_blocks", int4 & ((high != 1) | (wide != 32)), "has an INT4 block shape other than 1 x 32"),
        (
            "kernel.int4_groups",
            int4 & (pieces["cols"] % 32 != 0),
            "is INT4 with a number of columns not divisible by 32",
        ),
        (
            "kernel.scale_sum",
            no_sum,
            f"has a scale tensor outside the {len(sums)} entries of sums, or one that its op does not write",
        ),
        ("kernel.triton_item", triton_fp32, "quantizes fp32 by the rule triton, which is defined only for bf16"),
        ("kernel.scale_source", reads & (pieces["scale"] == 0), "has no address for its scales"),
        ("kernel.alignment", unaligned, "has an address or offset not aligned to its element or scale size"),
    )


def _unaligned(pieces: np.ndarray, item: np.ndarray, out: np.ndarray) -> np.ndarray:
    def misaligned(fields: tuple[str, ...], size: np.ndarray) -> np.ndarray:
        joined = np.bitwise_or.reduce([pieces[field].astype(np.uint64) for field in fields])
        return joined & (np.maximum(size, 1) - 1).astype(np.uint64) != 0

    source = misaligned(("src", "src_ld", "src_step"), item)
    target = misaligned(("dst", "dst_ld", "pos", "pos_ld"), out)
    return source | target | misaligned(("scale", "scale_ld", "scale_pos", "scale_pos_ld"), scale_bytes(pieces))


def _too_long(pieces: np.ndarray, cols: np.ndarray, size: np.ndarray) -> Problem:
    """Returns the `Problem` (error code, mask of pieces, description) for pieces whose rows are longer than a row of
    their tensor (`pos_ld`). `cols`, `size`: for each piece, elements per row and bytes per element, [pieces]."""
    fit = pieces["pos_ld"] // np.maximum(size.astype(np.int64), 1)
    return "kernel.rows", (pieces["rows"] > 1) & (fit < cols), "has rows longer than those of its tensor"


def check_destinations(pieces: np.ndarray, nbytes: int) -> None:
    """Raises SlimxError if a piece would write outside a bucket of `nbytes` bytes, or if two of its rows would
    overlap."""
    out = pieces["out"].astype(np.int64)
    cols = written_cols(pieces)
    _refuse(pieces, _too_long(pieces, cols, out))
    _check_room(pieces, ("dst", "dst_ld"), pieces["rows"], cols, out, nbytes)
    quantizes = np.isin(pieces["op"], QUANTIZES) & (pieces["cols"] > 0)
    scale_rows = np.where(quantizes, -(-pieces["rows"] // np.maximum(pieces["block_rows"], 1)), 0)
    scale_cols = np.where(quantizes, -(-pieces["cols"] // np.maximum(pieces["block_cols"], 1)), 0)
    long = (scale_rows > 1) & (pieces["scale_pos_ld"] < scale_cols * scale_bytes(pieces))
    _refuse(pieces, ("kernel.scale_rows", long, "has rows of scales longer than those of the scale tensor"))
    _check_room(pieces, ("scale", "scale_ld"), scale_rows, scale_cols, scale_bytes(pieces), nbytes)


def _check_room(
    pieces: np.ndarray, fields: tuple[str, str], rows: np.ndarray, cols: np.ndarray, size: np.ndarray, nbytes: int
) -> None:
    """Raises SlimxError if the data of a piece does not fit in a bucket of `nbytes` bytes.

    `rows`, `cols` and `size`, each [pieces]: for each piece, number of rows, elements per row, and bytes per element.
    `fields`: names of the record's fields that contain the offset of the first byte and the number of bytes per row.
    The check divides instead of multiplying, because the product of two invalid numbers could overflow and look like a
    valid offset."""
    first = pieces[fields[0]]
    ld = pieces[fields[1]]
    room = nbytes - np.minimum(first, nbytes + 1).astype(np.int64)
    too_wide = cols > room // np.maximum(size, 1)
    width = np.where(too_wide, 0, cols) * size
    outside = too_wide | (rows - 1 > (room - width) // np.maximum(ld, 1))
    _refuse(
        pieces,
        ("kernel.overlap", (rows > 1) & (cols > 0) & ~too_wide & (ld < width), "has rows that overlap in the bucket"),
        ("kernel.outside", (rows > 0) & (cols > 0) & outside, f"extends beyond the bucket of {nbytes} bytes"),
    )


def _refuse(pieces: np.ndarray, *problems: Problem) -> None:
    """Raises SlimxError if any piece has one of `problems`, naming the first problem that occurs and the first piece
    with it."""
    for code, bad, problem in problems:
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            p = pieces[k]
            op = OP(p["op"]).name if p["op"] in OP.__members__.values() else f"op {p['op']}"
            raise SlimxError(
                f"piece {k} of {len(pieces)} {problem} ({op}, tensor {p['tensor']}, {p['rows']} x {p['cols']} elements "
                f"of {p['item']} bytes, bucket offset {p['dst']}, {p['dst_ld']} bytes per row); set the "
                f"piece's fields as slimx.reshard.kernels.record.PIECE describes",
                code=code,
                about=str(k),
            )
