"""Python interface of exact mode's CUDA kernels (`csrc/exact_interface.cuh`), whose results are bitwise equal to those
of the functions with the same names in `reference.py`.

Kernels run in the current stream. This module can be imported without the compiled library, which is loaded on first
use.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from slimx.errors import SlimxError
from slimx.extras.exact.operations.forward.elementary import tree
from slimx.extras.exact.operations.forward.kernel import AttentionCall, check_dtype, check_weights, wide_of

# torch's elementwise operations in `combine` and `rotate` round as exact mode requires.
from slimx.extras.exact.operations.forward.reference import Gathered
from slimx.extras.exact.operations.forward.reference import combine as combine
from slimx.extras.exact.operations.forward.reference import rotate as rotate
from slimx.extras.exact.ordered import kernel_cuda as ordered

MOST_WIDTH = 524288
"""Maximum number of elements in a row that the kernels can sum; equals SLIMX_EXACT_MOST_WIDTH in
csrc/exact_interface.cuh."""
_MOST_SCORES = 2**26
"""Maximum number of fp32 attention scores in memory at a time (256 MiB); queries are processed in parts of at most this
size."""


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: Sequence[int],
    leaves: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes one linear layer per expert, bitwise equal to `reference.linear`, with one kernel launch per leaf of the
    sum; torch adds the leaves' results."""
    x = x.contiguous()
    weights = [weight.contiguous() for weight in weights]
    columns = check_weights(x, weights)
    width = x.shape[1]
    leaf = width // leaves
    addresses = torch.tensor([weight.data_ptr() for weight in weights], device=x.device)
    starts = torch.tensor([0, *counts], device=x.device).cumsum(0)
    sizes = len(weights), max(counts), columns, width
    parts = []
    for first in range(0, width, leaf):
        out = x.new_empty(len(x), columns, dtype=dtype if leaves == 1 else torch.float32)
        if out.numel():
            inputs = x.data_ptr(), addresses.data_ptr(), starts.data_ptr(), *sizes, first, leaf, wide_of(x)
            _call("linear", x, *inputs, out.data_ptr(), wide_of(out))
        parts.append(out)
    return tree(parts).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes RMSNorm, bitwise equal to that of `reference.rms_norm`. If the dtypes of x and weight differ, both are
    first converted to fp32."""
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight.float(), eps).to(x.dtype)
    x = x.contiguous()
    weight = weight.contiguous()
    out = torch.empty_like(x)
    if len(x):
        inputs = x.data_ptr(), weight.data_ptr(), *_checked_shape(x), ctypes.c_float(eps), wide_of(x)
        _call("rms_norm", x, *inputs, out.data_ptr())
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes SwiGLU's product silu(gate) * up, bitwise equal to that of `reference.silu_and_mul`."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    if len(x):
        _call("silu_and_mul", x, x.data_ptr(), *out.shape, wide_of(x), out.data_ptr())
    return out


def log_normalizer(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the two terms that log-softmax subtracts from logits, bitwise equal to those of
    `reference.log_normalizer`."""
    check_dtype("temperature", temperature, torch.float32)
    logits = logits.contiguous()
    temperature = temperature.contiguous()
    most, log_sum = torch.empty(2, len(logits), device=logits.device).unbind()
    if len(logits):
        inputs = logits.data_ptr(), temperature.data_ptr(), *_checked_shape(logits), wide_of(logits)
        _call("log_normalizer", logits, *inputs, most.data_ptr(), log_sum.data_ptr())
    return most, log_sum


def attend(query: torch.Tensor, read: Gathered, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """Computes attention over cached keys and values, bitwise equal to that of `reference.attend`. Waits for the GPU
    once, to read the largest number of keys of a query and whether queries share keys."""
    out = query.new_empty(*query.shape[:2], read.value.shape[2])
    if not len(query):
        return out
    neighbours = (read.begin.diff() == 0).any()
    longest, together = torch.stack((read.length.max(), neighbours.long())).tolist()
    heads = query.shape[1]
    rows = max(1, _MOST_SCORES // (longest * heads))
    scores = torch.empty(min(rows, len(query)) * heads * longest, device=query.device)
    sinks = None if sinks is None else sinks.float().contiguous()
    for first in range(0, len(query), rows):
        rows_slice = slice(first, first + rows)
        part = read._replace(begin=read.begin[rows_slice], length=read.length[rows_slice])
        record = AttentionCall.of(query[rows_slice], part, scale, sinks, out[rows_slice])
        _call("attend", query, ctypes.byref(record), scores.data_ptr(), longest, together)
    return out


def missing() -> str | None:
    """Returns the reason why this process cannot run exact mode on a GPU, as a sentence; None if it can."""
    try:
        load(ordered.LIBRARY)
    except SlimxError as error:
        return str(error)
    return (
        None if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device; run this on a GPU host"
    )


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """Loads the compiled library at `path` and declares the signatures of this module's kernels. Raises SlimxError as
    `ordered.kernel_cuda.load` does."""
    library = ordered.load(path)
    address = ctypes.c_void_p
    count = ctypes.c_int64
    code = ctypes.c_int
    real = ctypes.c_float
    library.slimx_exact_cuda_rms_norm.argtypes = [address, address, count, count, real, code, address, address]
    library.slimx_exact_cuda_silu_and_mul.argtypes = [address, count, count, code, address, address]
    library.slimx_exact_cuda_log_normalizer.argtypes = [address, address, count, count, code, address, address, address]
    library.slimx_exact_cuda_attend.argtypes = [address, address, count, code, address]
    return library


def _checked_shape(x: torch.Tensor) -> tuple[int, int]:
    """Returns the number of rows of `x` and the number of elements per row. Raises SlimxError if a row has more than
    MOST_WIDTH elements."""
    if x.shape[1] > MOST_WIDTH:
        raise SlimxError(
            f"a row has {x.shape[1]} elements, but the CUDA kernels of numerics.mode=exact support at most "
            f"{MOST_WIDTH}; set numerics.mode=fast, or run this model on the CPU",
            code="exact.width",
            about=str(x.shape[1]),
        )
    return x.shape[0], x.shape[1]


def _call(name: str, on: torch.Tensor, *arguments: object) -> None:
    load(ordered.LIBRARY)
    ordered.call(name, on, *arguments)
