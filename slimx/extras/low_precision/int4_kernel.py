"""Quantizes matrices to INT4 with one bf16 scale per 32 columns, by the kernels in `csrc/int4.h`. The kernels write
either codes and scales as compressed-tensors packs them, or the values with which engines compute.

Checkpoint conversions use the codes and scales, and trainers compute with the values. The same kernel function produces
both, on the CPU and on a GPU. Quantizing the values again gives the same codes and scales.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch  # imported before the library is loaded, so that both share one OpenMP runtime

from slimx.errors import SlimxError
from slimx.extras.low_precision.int4 import GROUP, PER_WORD
from slimx.library import load_library
from slimx.reshard.kernels.cpu import threads_of
from slimx.reshard.kernels.record import element_bytes

FOLDER = Path(__file__).parents[2] / "_lib"
CPU_LIBRARY = FOLDER / "libslimx_int4.so"
CUDA_LIBRARY = FOLDER / "libslimx_int4_cuda.so"
ABI = 1

_MATRIX = np.dtype(
    [
        ("src", np.uint64),
        ("src_ld", np.int64),
        ("rows", np.int64),
        ("groups", np.int64),
        ("codes", np.uint64),
        ("scales", np.uint64),
        ("values", np.uint64),
        ("values_ld", np.int64),
        ("item", np.int32),
        ("reserved", np.int32),
    ],
    align=True,
)
"""Layout of a kernel call's arguments: the struct SlimxInt4 in csrc/int4.h."""


def quantize(weight: torch.Tensor, *, threads: int | None = None) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Quantizes `weight` [rows, cols], bf16 or fp32. Returns, on the same device as `weight`, the codes, int32 [rows,
    cols / 8], and the scales, bf16 [rows, cols / 32]; the third result is True if all values are finite. `threads`:
    None for torch's number of threads.

    A group with a non-finite value has the scale NaN and codes 0. On a GPU, waits until the kernel has finished. Raises
    SlimxError unless the number of columns is a multiple of 32."""
    rows, cols = _shape(weight)
    codes = torch.empty(rows, cols // PER_WORD, dtype=torch.int32, device=weight.device)
    scales = torch.empty(rows, cols // GROUP, dtype=torch.bfloat16, device=weight.device)
    record = _record(weight)
    record["codes"] = codes.data_ptr()
    record["scales"] = scales.data_ptr()
    bad = _run(record, weight.device, threads)
    return codes, scales, not bad


def round_(weight: torch.Tensor, *, threads: int | None = None) -> None:
    """Rounds `weight` [rows, cols], bf16 or fp32, in place to the values that its INT4 codes represent. A group with a
    non-finite value becomes NaN. On a GPU, the kernel runs on the current stream, and this function does not wait for
    it."""
    record = _record(weight)
    record["values"] = record["src"]
    record["values_ld"] = record["src_ld"]
    _run(record, weight.device, threads, wait=False)


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    if weight.dim() != 2 or weight.shape[1] % GROUP or (weight.shape[1] > 1 and weight.stride(1) != 1):
        raise SlimxError(
            f"a tensor with shape {list(weight.shape)} and strides {weight.stride()} cannot be quantized to INT4; "
            f"pass a row-major matrix whose number of columns is a multiple of {GROUP}",
            code="int4.shape",
            about=str(list(weight.shape)),
        )
    return weight.shape[0], weight.shape[1]


def _record(weight: torch.Tensor) -> np.ndarray:
    rows, cols = _shape(weight)
    record = np.zeros(1, dtype=_MATRIX)
    record["item"] = element_bytes("a matrix in INT4", weight, torch.bfloat16, torch.float32)
    record["src"] = weight.data_ptr()
    record["src_ld"] = weight.stride(0) * weight.element_size()
    record["rows"] = rows
    record["groups"] = cols // GROUP
    return record


def _run(record: np.ndarray, device: torch.device, threads: int | None, *, wait: bool = True) -> bool:
    """Runs the kernel with the arguments `record`; returns True if a group contains a non-finite value. Without `wait`,
    the result on a GPU is always False."""
    if device.type == "cpu":
        return bool(_cpu().slimx_int4(record.ctypes.data, threads_of(threads)))
    library = _cuda(CUDA_LIBRARY)
    with torch.cuda.device(device):
        flags = torch.zeros(1, dtype=torch.int32, device=device)
        stream = torch.cuda.current_stream().cuda_stream
        status = library.slimx_int4_cuda(record.ctypes.data, flags.data_ptr(), stream)
    if status:
        reason = library.slimx_int4_cuda_error_string(status).decode()
        raise SlimxError(
            f"the INT4 kernel could not be launched on {device} ({reason}); check the GPU with nvidia-smi",
        )
    return wait and bool(flags.item())


@functools.cache
def _cpu() -> ctypes.CDLL:
    remedy = "run `make build` or `pip install --no-build-isolation -e .`, which need a C++ compiler"
    library = load_library(CPU_LIBRARY, what="the INT4 library", version="slimx_int4_abi", abi=ABI, remedy=remedy)
    library.slimx_int4.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return library


@functools.cache
def _cuda(path: Path) -> ctypes.CDLL:
    remedy = "run `make build` on a host with nvcc (CUDA 12.8 or later)"
    library = load_library(
        path, what="the INT4 library for GPUs", version="slimx_int4_cuda_abi", abi=ABI, remedy=remedy
    )
    library.slimx_int4_cuda.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    library.slimx_int4_cuda_error_string.argtypes = [ctypes.c_int]
    library.slimx_int4_cuda_error_string.restype = ctypes.c_char_p
    return library
