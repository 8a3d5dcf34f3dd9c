"""Python interface to the CPU kernels in `csrc/` that pack pieces into a bucket and compute checksums.

`csrc/reshard.h` defines the ops and the checksum, and `record.py` the record of a piece: one rectangle to copy or
convert. The functions take raw addresses: **the caller keeps every tensor that a piece points into alive and unmodified
until the call returns.** They release the GIL, so a transport can run in another thread meanwhile."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch  # imported before the kernel library is loaded, so that both share one OpenMP runtime

from slimx.errors import SlimxError
from slimx.library import load_library
from slimx.reshard.kernels.record import (
    NONFINITE,
    PIECE,
    RULE,
    check_destinations,
    check_ops,
    check_sources,
    check_sums,
    rectangle,
)

LIBRARY = Path(__file__).parents[2] / "_lib" / "libslimx_cpu.so"
ABI = 4


TRITON_SCALES = Path(__file__).with_name("triton_scales.npy")
"""Table of fp8 scales for the quantization rule `triton`, [32640, 2] fp32, written by a GPU: for every finite bf16 amax
(largest magnitude of a block) the scale s = amax / 448 and 1 / s."""

_ISAS = {"best": 0, "scalar": 1, "avx2": 2, "avx512": 3}
_BF16_AMAX = 0x7F80
"""Number of finite, non-negative bf16 values. The table of scales has one row per value."""
_NO_MEMORY = 1
_NO_SUCH_ISA = 2


def seeds(nbytes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the initial value of each tensor's checksum, [tensors] uint64, computed from its size in bytes
    (`nbytes`).

    Exactly one rank adds this initial value, so that the complete checksum also depends on the tensor's size."""
    sizes = np.ascontiguousarray(nbytes, dtype=np.int64)
    sums = np.zeros(sizes.shape, dtype=np.uint64)
    library().slimx_seed(sizes.ctypes.data, sizes.size, sums.ctypes.data)
    return sums


def pack(
    pieces: np.ndarray,
    bucket: torch.Tensor,
    sums: np.ndarray,
    flags: np.ndarray | None = None,
    *,
    names: Sequence[str] | None = None,
    isa: str = "best",
    threads: int | None = None,
) -> None:
    """Performs the ops of `pieces`, [n] of `PIECE`, writes the results into `bucket`, [bytes] uint8, and adds their
    checksums to `sums`, [tensors] uint64.

    A tensor's checksum is complete when the sums of all its bytes and its seed (`seeds`) have been added, on any rank
    and in any order. `flags`, [tensors] uint32, receives bits such as NONFINITE, which the caller forwards or turns
    into an error (`refuse_nonfinite`). If `flags` is None, an infinite or NaN value raises SlimxError after the bucket
    is written; the message contains the tensor's name from `names`. `isa`: one of `isas()`; all produce the same bits.
    `threads`: None means torch's number of threads. Raises SlimxError before anything is written if a piece is invalid
    or outside the bucket."""
    if bucket.dtype != torch.uint8 or bucket.device.type != "cpu" or not bucket.is_contiguous():
        raise SlimxError(
            f"the bucket is a {bucket.dtype} tensor on {bucket.device}; pass a contiguous uint8 tensor in CPU memory",
            code="kernel.bucket",
            about="bucket",
        )
    check_sources(pieces, sums)
    check_ops(pieces, sums)
    check_destinations(pieces, bucket.numel())
    out_flags = np.zeros(len(sums), dtype=np.uint32) if flags is None else flags
    if out_flags.dtype != np.uint32 or out_flags.shape != sums.shape or not out_flags.flags.carray:
        raise SlimxError(
            f"flags is an array of {out_flags.dtype} with shape {out_flags.shape}; pass a contiguous uint32 array "
            "with the shape of sums",
            code="kernel.flags",
            about="flags",
        )
    table = triton_scales(TRITON_SCALES).ctypes.data if (pieces["rule"] == RULE.TRITON).any() else None
    status = library().slimx_pack(
        pieces.ctypes.data,
        len(pieces),
        bucket.data_ptr(),
        sums.ctypes.data,
        out_flags.ctypes.data,
        table,
        _isa(isa),
        threads_of(threads),
    )
    _raise_for(status, isa)
    if flags is None:
        refuse_nonfinite(out_flags, names)


def refuse_nonfinite(flags: np.ndarray, names: Sequence[str] | None = None) -> None:
    """Raises SlimxError if the NONFINITE bit of a tensor is set in `flags`, [tensors] uint32. The message names the
    first such tensor by `names`, or by its index if `names` is None."""
    bad = np.flatnonzero(flags & NONFINITE)
    if len(bad):
        first = names[bad[0]] if names is not None else f"tensor {bad[0]}"
        raise SlimxError(
            f"{first} has a value that is infinite, NaN or too large for bf16 (affected tensors: {len(bad)}), "
            "so these weights cannot be published; resume from an older checkpoint with a lower trainer.optimizer.lr",
            code="kernel.nonfinite",
            about=first,
        )


@functools.cache
def triton_scales(path: Path) -> np.ndarray:
    """Returns the table of fp8 scales for the quantization rule `triton` (`TRITON_SCALES`), read from `path`. Raises
    SlimxError if the file is missing or does not contain that table."""
    remedy = (
        "run `make gpu` on a GPU machine and copy its triton_scales.npy to this path, or use the quantization rule ieee"
    )
    if not path.exists():
        raise SlimxError(
            f"{path}, the table of scales for the quantization rule triton, does not exist; {remedy}",
            code="kernel.no_table",
            about=str(path),
        )
    table = np.load(path, allow_pickle=False)
    if table.dtype != np.float32 or table.shape != (_BF16_AMAX, 2) or not table.flags.carray:
        raise SlimxError(
            f"{path} contains {table.dtype} values of shape {table.shape}, but the table of scales must be "
            f"float32 of shape ({_BF16_AMAX}, 2); {remedy}",
            code="kernel.table_form",
            about=str(path),
        )
    amax = np.maximum((np.arange(_BF16_AMAX, dtype=np.uint32) << 16).view(np.float32), np.float32(1e-10))
    exact = np.stack([amax.astype(np.float64) / 448, 448 / amax.astype(np.float64)], axis=1)
    if not np.allclose(table, exact, rtol=1e-6, atol=0):
        raise SlimxError(
            f"a row of the fp8 scales in {path} differs from its correct values, amax / 448 and 448 / amax; {remedy}",
            code="kernel.table",
            about=str(path),
        )
    return table


def checksum_rects(pieces: np.ndarray, sums: np.ndarray, *, isa: str = "best", threads: int | None = None) -> None:
    """Adds the checksums of the source bytes of `pieces` to `sums`, [tensors] uint64, without copying anything.

    Pieces may be whole tensors or parts of them, of any strides. The sums of a tensor's parts on several ranks add up
    to its checksum if exactly one rank starts from `seeds` and the others start from 0."""
    check_sources(pieces, sums)
    check_sums(pieces)
    status = library().slimx_checksum(pieces.ctypes.data, len(pieces), sums.ctypes.data, _isa(isa), threads_of(threads))
    _raise_for(status, isa)


def checksum_tensor(t: torch.Tensor, *, isa: str = "best", threads: int | None = None) -> int:
    """Returns the 64-bit checksum of the whole tensor `t`, which must be contiguous or a 2-D view of any strides.

    For many tensors one call of `checksum_rects` is faster, because every call has about 30 us of overhead."""
    view = t.reshape(-1) if t.is_contiguous() else t
    sums = seeds([t.numel() * t.element_size()])
    record = rectangle(view, tensor=0, pos=0, pos_ld=view.shape[-1] * t.element_size())
    checksum_rects(np.array([record], dtype=PIECE), sums, isa=isa, threads=threads)
    return int(sums[0])


def isas() -> list[str]:
    """Returns the names of the instruction sets that this processor supports, which can be passed as `isa`; always
    includes "best", which stands for the fastest of them."""
    return [name for name, code in _ISAS.items() if library().slimx_has_isa(code)]


def load(path: Path) -> ctypes.CDLL:
    """Returns the CPU kernel library at `path`, with the argument types of its functions declared. Raises SlimxError if
    the library is missing, cannot be loaded, or has another ABI version."""
    remedy = "run `make build` or `pip install --no-build-isolation -e .`; both need a C++ compiler"
    library = load_library(path, what="the kernel library", version="slimx_abi", abi=ABI, remedy=remedy)
    address = ctypes.c_void_p
    count = ctypes.c_int64
    code = ctypes.c_int
    library.slimx_seed.argtypes = [address, count, address]
    library.slimx_seed.restype = None
    library.slimx_pack.argtypes = [address, count, address, address, address, address, code, code]
    library.slimx_checksum.argtypes = [address, count, address, code, code]
    library.slimx_delta_encode.argtypes = [address, address, count, code, address, address, code]
    library.slimx_delta_apply.argtypes = [address, count, address, count, code, code]
    return library


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the CPU kernel library of this installation; loads it on the first call."""
    return load(LIBRARY)


def _isa(name: str) -> int:
    if name not in _ISAS:
        raise SlimxError(
            f"the instruction set {name!r} is unknown; choose one of {', '.join(_ISAS)}", code="kernel.isa", about=name
        )
    return _ISAS[name]


def threads_of(threads: int | None) -> int:
    """Returns `threads`, or torch's number of threads if `threads` is None. Raises SlimxError if `threads` is less than
    1."""
    if threads is not None and threads < 1:
        raise SlimxError(
            f"threads is {threads}, but must be at least 1; pass a positive number, or None for torch's thread count",
            code="kernel.threads",
            about=str(threads),
        )
    return threads or torch.get_num_threads()


def _raise_for(status: int, isa: str) -> None:
    if status == _NO_SUCH_ISA:
        raise SlimxError(
            f"this processor does not support the instruction set {isa}; choose one of {', '.join(isas())}",
            code="kernel.isa",
            about=str(isa),
        )
    if status == _NO_MEMORY:
        raise SlimxError(
            "the CPU packing kernel could not allocate memory for its list of tiles; free memory on this machine, or "
            "pack fewer pieces at a time",
        )
    if status:
        raise SlimxError(
            f"the CPU packing kernel returned the unknown status {status}; rebuild the library with `make build`",
        )
