"""The reshard kernels of `csrc/` from Python: copy pieces into a bucket and checksum tensors, on the CPU.

`csrc/reshard.h` defines the record and the checksum; `reference.py` says the same in numpy. The calls take raw
addresses: **the caller keeps every tensor that a piece points into alive and unwritten until the call returns.** The
interpreter lock is released meanwhile, so a transport may run beside it.
"""

import ctypes
import functools
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch  # before the library is loaded: both then share one OpenMP runtime

from slimx.errors import SlimxError

LIBRARY = Path(__file__).parents[1] / "_lib" / "libslimx_cpu.so"
ABI = 2


class OP(IntEnum):
    """What becomes of a piece's elements: SlimxOp in csrc/reshard.h."""

    COPY = 0
    COPY_CHECKED = 1
    FP32_TO_BF16 = 2
    BF16_TO_FP32 = 3
    QUANTISE_FP8 = 4
    QUANTISE_MXFP8 = 5
    DEQUANTISE_FP8 = 6
    DEQUANTISE_MXFP8 = 7


class RULE(IntEnum):
    """How a quantising op chooses a block's scale: SlimxRule in csrc/numerics.h."""

    NONE = 0
    IEEE = 1
    TRITON = 2
    TE = 3
    UE8M0 = 4
    MXFP8 = 5


PIECE = np.dtype(
    [
        ("src", np.uint64),  # address of the first byte to read
        ("src_ld", np.int64),  # bytes from one source row to the next
        ("src_step", np.int64),  # bytes from one source element to the next
        ("dst", np.uint64),  # byte offset in the bucket; checksum_rects ignores it
        ("dst_ld", np.int64),  # bytes from one row to the next in the bucket; checksum_rects ignores it
        ("pos", np.uint64),  # byte offset of the rectangle in the whole destination tensor
        ("pos_ld", np.int64),  # bytes in one row of the whole destination tensor
        ("rows", np.int64),  # elements
        ("cols", np.int64),  # elements
        ("scale", np.uint64),  # the first block's scale: byte offset in the bucket (quantise) or address (dequantise)
        ("scale_ld", np.int64),  # bytes there from one row of scales to the next
        ("scale_pos", np.uint64),  # byte offset of that scale in the whole scale tensor (quantise)
        ("scale_pos_ld", np.int64),  # bytes in one row of the whole scale tensor (quantise)
        ("tensor", np.int32),  # index into `sums` and `flags`: the values
        ("scale_tensor", np.int32),  # index into `sums`: the scales (quantise), else -1
        ("block_rows", np.int32),  # elements of a block, 0 where the op has none
        ("block_cols", np.int32),
        ("op", np.uint8),  # OP
        ("rule", np.uint8),  # RULE
        ("item", np.uint8),  # bytes of one source element
        ("out", np.uint8),  # bytes of one destination element
        ("reserved", np.uint32),  # 0
    ],
    align=True,
)
assert PIECE.itemsize == 128, "SlimxPiece in csrc/reshard.h"

_ISAS = {"best": 0, "scalar": 1, "avx2": 2, "avx512": 3}
_NO_MEMORY, _NO_SUCH_ISA = 1, 2


def rectangle(
    view: torch.Tensor, *, tensor: int, pos: int, pos_ld: int, dst: int = 0, dst_ld: int | None = None
) -> tuple[int, ...]:
    """One record of a `PIECE` array: `view` [rows, cols] or [cols], unit stride along cols, is part of a tensor.

    `pos`, `dst`: byte offset of its first element in the whole tensor and in the bucket. `pos_ld`, `dst_ld`: bytes per
    row there; `dst_ld` is `pos_ld` unless given. Does not keep `view` alive.
    """
    flat = view.unsqueeze(0) if view.dim() == 1 else view
    if flat.dim() != 2 or (flat.shape[1] > 1 and flat.stride(1) != 1) or flat.device.type != "cpu":
        raise SlimxError(
            f"a piece of shape {list(view.shape)}, strides {view.stride()} on {view.device} is no rectangle of CPU "
            "memory: pass a 1-D or 2-D view with unit stride along its last axis"
        )
    size = view.element_size()
    dst_ld = pos_ld if dst_ld is None else dst_ld
    place = (dst, dst_ld, pos, pos_ld, *flat.shape)
    return (flat.data_ptr(), flat.stride(0) * size, size, *place, 0, 0, 0, 0, tensor, -1, 0, 0, 0, 0, size, size, 0)


def seeds(nbytes: Sequence[int] | np.ndarray) -> np.ndarray:
    """The sums [tensors] uint64 to start from: each tensor's size in bytes enters its checksum once, through this."""
    sizes = np.ascontiguousarray(nbytes, dtype=np.int64)
    sums = np.zeros(sizes.shape, dtype=np.uint64)
    _library().slimx_seed(sizes.ctypes.data, sizes.size, sums.ctypes.data)
    return sums


def pack(
    pieces: np.ndarray, bucket: torch.Tensor, sums: np.ndarray, *, isa: str = "best", threads: int | None = None
) -> None:
    """Copies `pieces` [n] of `PIECE` into `bucket` [bytes] uint8 and adds their bytes to `sums` [tensors] uint64.

    A tensor's checksum is complete when all its bytes and its seed have been added, here or elsewhere, in any order.
    `isa`: one of `isas()`; all give the same bits. `threads`: torch's number of threads unless given. Raises SlimxError
    for a piece that would be written outside the bucket, before anything is written.
    """
    if bucket.dtype != torch.uint8 or bucket.device.type != "cpu" or not bucket.is_contiguous():
        raise SlimxError(f"the bucket is {bucket.dtype} on {bucket.device}: pass contiguous uint8 memory of the CPU")
    _check(pieces, sums)
    _check_destinations(pieces, bucket.numel())
    status = _library().slimx_pack(
        pieces.ctypes.data, len(pieces), bucket.data_ptr(), sums.ctypes.data, None, None, _isa(isa), _threads(threads)
    )
    _raise_for(status, isa)


def checksum_rects(pieces: np.ndarray, sums: np.ndarray, *, isa: str = "best", threads: int | None = None) -> None:
    """Adds to `sums` what `pack` would add, without copying: for tensors, or parts of them, held in any layout.

    Parts of one tensor held by several ranks add up: one of them starts from `seeds`, the others from 0.
    """
    _check(pieces, sums)
    status = _library().slimx_checksum(pieces.ctypes.data, len(pieces), sums.ctypes.data, _isa(isa), _threads(threads))
    _raise_for(status, isa)


def checksum_tensor(t: torch.Tensor, *, isa: str = "best", threads: int | None = None) -> int:
    """The checksum, 64 bits, of the whole tensor `t`: contiguous, or a 2-D view with unit stride along its last axis.

    For many tensors one `checksum_rects` is faster: a call costs some 30 us before the first byte.
    """
    view = t.reshape(-1) if t.is_contiguous() else t
    sums = seeds([t.numel() * t.element_size()])
    record = rectangle(view, tensor=0, pos=0, pos_ld=view.shape[-1] * t.element_size())
    checksum_rects(np.array([record], dtype=PIECE), sums, isa=isa, threads=threads)
    return int(sums[0])


def isas() -> list[str]:
    """The instruction sets that this processor can run."""
    return [name for name, code in _ISAS.items() if _library().slimx_has_isa(code)]


def load(path: Path) -> ctypes.CDLL:
    """The library at `path` with its signatures declared. Raises SlimxError if it is missing, broken or stale."""
    build = "run `make build` or `pip install --no-build-isolation -e .`, which need a C++ compiler"
    if not path.exists():
        raise SlimxError(f"the kernel library {path} is missing: {build}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise SlimxError(f"the kernel library {path} cannot be loaded ({error}): {build}") from error
    abi = library.slimx_abi() if hasattr(library, "slimx_abi") else None
    if abi != ABI:
        raise SlimxError(f"the kernel library {path} is stale (interface {abi}, slimx needs {ABI}): {build}")
    address, count, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.slimx_seed.argtypes = [address, count, address]
    library.slimx_seed.restype = None
    library.slimx_pack.argtypes = [address, count, address, address, address, address, code, code]
    library.slimx_checksum.argtypes = [address, count, address, code, code]
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    return load(LIBRARY)


def _isa(name: str) -> int:
    if name not in _ISAS:
        raise SlimxError(f"unknown instruction set {name!r}: choose one of {', '.join(_ISAS)}")
    return _ISAS[name]


def _threads(threads: int | None) -> int:
    if threads is not None and threads < 1:
        raise SlimxError(f"{threads} threads cannot pack a bucket: pass 1 or more")
    return threads or torch.get_num_threads()


def _raise_for(status: int, isa: str) -> None:
    if status == _NO_SUCH_ISA:
        raise SlimxError(f"this processor has no {isa}: choose one of {', '.join(isas())}")
    if status == _NO_MEMORY:
        raise SlimxError("the reshard kernel found no memory for its list of tiles: pack fewer pieces at a time")
    if status:
        raise SlimxError(f"the reshard kernel returned the unknown status {status}: rebuild it with `make build`")


def _check(pieces: np.ndarray, sums: np.ndarray) -> None:
    """What both functions need; addresses cannot be checked."""
    if pieces.dtype != PIECE or pieces.ndim != 1 or not pieces.flags.c_contiguous:
        raise SlimxError(f"pieces are {pieces.dtype} {pieces.shape}: pass a contiguous 1-D array of kernel.PIECE")
    if sums.dtype != np.uint64 or sums.ndim != 1 or not sums.flags.carray:
        raise SlimxError(f"sums are {sums.dtype} {sums.shape}: pass a contiguous, writable 1-D array of uint64")
    rows, row_bytes, tensor = pieces["rows"], _row_bytes(pieces), pieces["tensor"]
    _refuse(pieces, (rows < 0) | (row_bytes < 0) | (pieces["src_ld"] < 0), "has a negative extent")
    _refuse(pieces, (tensor < 0) | (tensor >= len(sums)), f"names a tensor outside the {len(sums)} sums")
    _refuse(pieces, (rows > 0) & (row_bytes > 0) & (pieces["src"] == 0), "has no source address")
    _refuse(pieces, (rows > 1) & (pieces["pos_ld"] < row_bytes), "has rows longer than its tensor's")
    _refuse(pieces, pieces["reserved"] != 0, "has a reserved field that is not 0")


def _check_destinations(pieces: np.ndarray, nbytes: int) -> None:
    rows, row_bytes, dst_ld = pieces["rows"], _row_bytes(pieces), pieces["dst_ld"]
    _refuse(pieces, (rows > 1) & (dst_ld < row_bytes), "has rows that overlap in the bucket")
    # By division: a product of two wrong numbers could wrap round into the bucket.
    room = nbytes - np.minimum(pieces["dst"], nbytes + 1).astype(np.int64) - row_bytes
    outside = (room < 0) | (rows - 1 > room // np.maximum(dst_ld, 1))
    _refuse(pieces, (rows > 0) & (row_bytes > 0) & outside, f"ends outside the bucket of {nbytes} bytes")


def _row_bytes(pieces: np.ndarray) -> np.ndarray:
    return pieces["cols"] * pieces["item"]


def _refuse(pieces: np.ndarray, bad: np.ndarray, what: str) -> None:
    if bad.any():
        k = int(np.flatnonzero(bad)[0])
        p = pieces[k]
        raise SlimxError(
            f"piece {k} of {len(pieces)} {what} (tensor {p['tensor']}, {p['rows']} rows of {p['cols']} elements, "
            f"bucket offset {p['dst']}, rows {p['dst_ld']} bytes apart): correct the plan that made it"
        )
