"""The CUDA kernel of linear layers with one order of sums (`csrc/exact_interface.cuh`) from Python: the bits of
`reference.py`.

Work is queued on the current stream. Importable anywhere: a library that is missing is refused where it is needed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch  # before the library is loaded, as in kernel.py

from slimx.errors import SlimxError
from slimx.library import load_library
from slimx.numerics.ordered.kernel import check_weights
from slimx.numerics.ordered.reference import tree

LIBRARY = Path(__file__).parents[2] / "_lib" / "libslimx_exact_cuda.so"
ABI = 102
"""SLIMX_EXACT_CUDA_ABI in csrc/exact_interface.cuh."""
_WIDE = {torch.float32: 1, torch.bfloat16: 0}


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: Sequence[int],
    leaves: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute `reference.linear`. Leaves are launches of their own, and meet in torch."""
    x, held = x.contiguous(), [weight.contiguous() for weight in weights]
    columns, width = check_weights(x, held), x.shape[1]
    addresses = torch.tensor([weight.data_ptr() for weight in held], device=x.device)
    starts = torch.tensor([0, *counts], device=x.device).cumsum(0)
    sizes, leaf = (len(held), max(counts), columns, width), width // leaves
    parts = []
    for first in range(0, width, leaf):
        out = x.new_empty(len(x), columns, dtype=dtype if leaves == 1 else torch.float32)
        if out.numel():
            given = x.data_ptr(), addresses.data_ptr(), starts.data_ptr(), *sizes, first, leaf, is_wide(x)
            call("linear", x, *given, out.data_ptr(), is_wide(out))
        parts.append(out)
    return tree(parts).to(dtype)


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, its linear declared. Raises SlimxError if it is missing, broken or stale."""
    library = load_library(
        path,
        what="the CUDA library of ordered sums",
        version="slimx_exact_cuda_abi",
        abi=ABI,
        remedy="run `make build` where nvcc is (CUDA 12.8 or later)",
    )
    address, count, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.slimx_exact_cuda_error_string.argtypes = [code]
    library.slimx_exact_cuda_error_string.restype = ctypes.c_char_p
    library.slimx_exact_cuda_linear.argtypes = [*[address] * 3, *[count] * 6, code, address, code, address]
    return library


def is_wide(t: torch.Tensor) -> int:
    """The kernels' number for fp32 (1) or bf16 (0). Raises SlimxError for another dtype."""
    if t.dtype not in _WIDE:
        raise SlimxError(
            f"ordered sums are computed in bf16 or fp32, not {t.dtype} on {t.device}: convert it",
            code="exact.dtype",
            about=str(t.dtype),
        )
    return _WIDE[t.dtype]


def call(name: str, on: torch.Tensor, *arguments: object) -> None:
    """Call a kernel of the library, whose signature is declared, on the device of `on`."""
    library = load(LIBRARY)
    with torch.cuda.device(on.device):
        stream = torch.cuda.current_stream().cuda_stream
        status = getattr(library, f"slimx_exact_cuda_{name}")(*arguments, stream)
    if status:
        reason = library.slimx_exact_cuda_error_string(status).decode()
        raise SlimxError(
            f"{name} cannot be launched on {on.device}: {reason} (CUDA error {status})",
            code="exact.launch",
            about=name,
        )
