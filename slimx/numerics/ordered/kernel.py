"""The CPU kernel of linear layers with one order of sums (`csrc/exact.h`) from Python: the bits of `reference.py`.

Loads the library that has it, and calls what else is in there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch  # before the library is loaded: both then share one OpenMP runtime

from slimx.errors import SlimxError
from slimx.library import load_library

LIBRARY = Path(__file__).parents[2] / "_lib" / "libslimx_exact.so"
ABI = 1
"""SLIMX_EXACT_ABI in csrc/exact.h."""
MOST_LEAVES = 64
"""SLIMX_MOST_LEAVES in csrc/exact.h."""
_ISAS = {"best": 0, "scalar": 1, "avx2": 2, "avx512": 3, "amx": 4}
_WIDE = {torch.float32: 1, torch.bfloat16: 0}


class _Group(ctypes.Structure):
    """SlimxExactGroup."""

    _fields_ = [("weight", ctypes.c_void_p), ("rows", ctypes.c_int64)]


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: Sequence[int],
    leaves: int,
    dtype: torch.dtype,
    *,
    isa: str = "best",
) -> torch.Tensor:
    """Compute `reference.linear`; `isa`: one of `isas()`, here and below."""
    if leaves > MOST_LEAVES:
        raise SlimxError(
            f"{leaves} leaves are more than the kernels' {MOST_LEAVES}: use fewer",
            code="exact.leaves",
            about=str(leaves),
        )
    x, held = x.contiguous(), [weight.contiguous() for weight in weights]
    columns = check_weights(x, held)
    out = x.new_empty(len(x), columns, dtype=dtype)
    groups = (_Group * len(held))(*((w.data_ptr(), n) for w, n in zip(held, counts, strict=True)))
    sizes = len(held), columns, x.shape[1], leaves
    call("linear", isa, x.data_ptr(), groups, *sizes, is_wide(x), out.data_ptr(), is_wide(out))
    return out


def check_weights(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """Rows of each of `weights`. Raises SlimxError unless all are of one shape, and fit `x` [T, K]."""
    columns = weights[0].shape[0]
    if any(weight.shape != (columns, x.shape[1]) or weight.dtype != x.dtype for weight in weights):
        raise SlimxError(
            f"weights do not all have the shape {[columns, x.shape[1]]} and dtype of x ({x.dtype})",
            code="exact.weights",
            about="weights",
        )
    return columns


def isas() -> tuple[str, ...]:
    """Instruction sets of this processor that the library has kernels for; empty on other processors than x86-64."""
    return tuple(name for name, number in _ISAS.items() if load().slimx_exact_has_isa(number) and name != "best")


@functools.cache
def load(path: Path = LIBRARY) -> ctypes.CDLL:
    """The library at `path`, its linear declared. Raises SlimxError if it is missing, broken or stale."""
    library = load_library(
        path, what="the library of ordered sums", version="slimx_exact_abi", abi=ABI, remedy="run `make build`"
    )
    address, count, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.slimx_exact_has_isa.argtypes = [code]
    library.slimx_exact_linear.argtypes = [address, address, *[count] * 3, code, code, address, code, code, code]
    return library


def is_wide(t: torch.Tensor) -> int:
    """The kernels' number for fp32 (1) or bf16 (0). Raises SlimxError for another dtype or device."""
    if t.dtype not in _WIDE or t.device.type != "cpu":
        raise SlimxError(
            f"ordered sums are computed in bf16 or fp32, not {t.dtype} on {t.device}: convert it",
            code="exact.dtype",
            about=str(t.dtype),
        )
    return _WIDE[t.dtype]


def call(name: str, isa: str, *arguments: object) -> None:
    """Call a kernel of the library, whose signature is declared. Raises SlimxError for what it answers."""
    if isa not in _ISAS:
        raise SlimxError(
            f"the instruction set {isa!r} is not known: use {', '.join(_ISAS)}", code="exact.isa", about=isa
        )
    status = getattr(load(), f"slimx_exact_{name}")(*arguments, _ISAS[isa], torch.get_num_threads())
    if status == 1:
        raise SlimxError(
            f"there is no memory for the scratch of {name}: use smaller microbatches",
            code="exact.scratch",
            about=name,
        )
    if status:
        raise SlimxError(
            f"this processor lacks the instruction set {isa}: use one of {', '.join(isas()) or 'none'}",
            code="exact.isa",
            about=isa,
        )
