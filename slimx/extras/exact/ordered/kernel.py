"""The CPU kernel of products with one order of sums (`csrc/exact.h`) from Python: the bits of `reference.py`."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch  # before the library is loaded: both then share one OpenMP runtime

from slimx.errors import SlimxError
from slimx.library import load_library

LIBRARY = Path(__file__).parents[3] / "_lib" / "libslimx_exact.so"
ABI = 1
"""SLIMX_EXACT_ABI in csrc/exact.h."""
ISAS = {"best": 0, "scalar": 1, "avx2": 2, "avx512": 3, "amx": 4}
FP32 = 1
"""The number of fp32 in calls of kernels."""


class Group(ctypes.Structure):
    """SlimxExactGroup."""

    _fields_ = [("weight", ctypes.c_void_p), ("rows", ctypes.c_int64)]


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `reference.product` of fp32 tensors."""
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty(len(x), len(weight))
    group = Group(weight.data_ptr(), len(x))
    sizes = 1, *weight.shape, 1
    threads = torch.get_num_threads()
    status = load().slimx_exact_linear(
        x.data_ptr(), ctypes.byref(group), *sizes, FP32, out.data_ptr(), FP32, ISAS["best"], threads
    )
    if status:
        raise SlimxError(
            f"there is no memory for the scratch of a product with {list(weight.shape)}: use fewer threads",
        )
    return out


def isas() -> tuple[str, ...]:
    """Instruction sets of this processor that the library has kernels for; empty on other processors than x86-64."""
    return tuple(name for name, number in ISAS.items() if load().slimx_exact_has_isa(number) and name != "best")


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
