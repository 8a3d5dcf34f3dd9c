"""Python interface of the CPU kernel for products with a fixed order of summation (`csrc/exact.h`), whose results are
bitwise equal to those of `reference.py`."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch  # imported before the library is loaded, so that both share one OpenMP runtime

from slimx.errors import SlimxError
from slimx.library import load_library

LIBRARY = Path(__file__).parents[3] / "_lib" / "libslimx_exact.so"
ABI = 1
"""Version of the library's interface; must equal SLIMX_EXACT_ABI in csrc/exact.h."""
ISAS = {"best": 0, "scalar": 1, "avx2": 2, "avx512": 3, "amx": 4}
FP32 = 1
"""Code for the dtype fp32 in kernel arguments."""


class WeightGroup(ctypes.Structure):
    """A weight matrix and the number of input rows that it multiplies; corresponds to the struct SlimxExactGroup in
    csrc/exact.h."""

    _fields_ = [("weight", ctypes.c_void_p), ("rows", ctypes.c_int64)]


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes the matrix product of fp32 tensors on the CPU, bitwise equal to that of `reference.product`."""
    x = x.contiguous()
    weight = weight.contiguous()
    out = x.new_empty(len(x), len(weight))
    group = WeightGroup(weight.data_ptr(), len(x))
    sizes = 1, *weight.shape, 1
    threads = torch.get_num_threads()
    status = load().slimx_exact_linear(
        x.data_ptr(), ctypes.byref(group), *sizes, FP32, out.data_ptr(), FP32, ISAS["best"], threads
    )
    if status:
        raise SlimxError(
            f"no memory is left for the scratch space of a product with a matrix of shape {list(weight.shape)}; lower "
            "trainer.threads or rollout.engines.threads",
        )
    return out


def isas() -> tuple[str, ...]:
    """Returns the names of this processor's instruction sets for which the library has kernels; empty on processors
    other than x86-64."""
    return tuple(name for name, code in ISAS.items() if load().slimx_exact_has_isa(code) and name != "best")


@functools.cache
def load(path: Path = LIBRARY) -> ctypes.CDLL:
    """Loads the compiled library at `path` and declares the signature of its linear kernel. Raises SlimxError if the
    library is missing, outdated or cannot be loaded."""
    library = load_library(
        path,
        what="the library of products with ordered sums",
        version="slimx_exact_abi",
        abi=ABI,
        remedy="run `make build`",
    )
    address = ctypes.c_void_p
    count = ctypes.c_int64
    code = ctypes.c_int
    library.slimx_exact_has_isa.argtypes = [code]
    library.slimx_exact_linear.argtypes = [address, address, *[count] * 3, code, code, address, code, code, code]
    return library
