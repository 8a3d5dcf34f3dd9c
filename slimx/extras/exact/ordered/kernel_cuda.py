"""Python interface of the CUDA kernel for products with a fixed order of summation (`csrc/exact_interface.cuh`), whose
results are bitwise equal to those of `reference.py`.

Kernels run in the current stream. This module can be imported without the compiled library, which is loaded on first
use.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch  # imported before the library is loaded, as in kernel.py

from slimx.errors import SlimxError
from slimx.extras.exact.ordered.kernel import FP32
from slimx.library import load_library

LIBRARY = Path(__file__).parents[3] / "_lib" / "libslimx_exact_cuda.so"
ABI = 102
"""Version of the library's interface; must equal SLIMX_EXACT_CUDA_ABI in csrc/exact_interface.cuh."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes the matrix product of fp32 tensors on a GPU, bitwise equal to that of `reference.product`."""
    x = x.contiguous()
    weight = weight.contiguous()
    rows = len(x)
    columns, width = weight.shape
    out = x.new_empty(rows, columns)
    addresses = torch.tensor([weight.data_ptr()], device=x.device)
    starts = torch.tensor([0, rows], device=x.device)
    if out.numel():
        tensors = x.data_ptr(), addresses.data_ptr(), starts.data_ptr()
        call("linear", x, *tensors, 1, rows, columns, width, 0, width, FP32, out.data_ptr(), FP32)
    return out


def call(name: str, on: torch.Tensor, *arguments: object) -> None:
    """Launches the kernel `name`, whose signature has been declared, on the device of tensor `on`. Raises SlimxError if
    it cannot be launched."""
    library = load(LIBRARY)
    with torch.cuda.device(on.device):
        stream = torch.cuda.current_stream().cuda_stream
        status = getattr(library, f"slimx_exact_cuda_{name}")(*arguments, stream)
    if status:
        reason = library.slimx_exact_cuda_error_string(status).decode()
        raise SlimxError(
            f"exact mode's CUDA kernel {name} cannot be launched on {on.device} ({reason}, CUDA error {status}); "
            "check the GPU with nvidia-smi",
        )


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """Loads the compiled library at `path` and declares the signature of its linear kernel. Raises SlimxError if the
    library is missing, outdated or cannot be loaded."""
    library = load_library(
        path,
        what="the CUDA library of products with ordered sums",
        version="slimx_exact_cuda_abi",
        abi=ABI,
        remedy="run `make build` on a host with nvcc (CUDA 12.8 or later)",
    )
    address = ctypes.c_void_p
    count = ctypes.c_int64
    code = ctypes.c_int
    library.slimx_exact_cuda_error_string.argtypes = [code]
    library.slimx_exact_cuda_error_string.restype = ctypes.c_char_p
    library.slimx_exact_cuda_linear.argtypes = [*[address] * 3, *[count] * 6, code, address, code, address]
    return library
