"""Frames: encoded changes between two versions of the same bytes (`csrc/delta.h` defines the format).

A frame comes from another process, so `apply` checks every size and mask in it before it writes the first byte."""

from __future__ import annotations

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cpu

CHUNK = 65536
"""Size of a chunk in bytes (SLIMX_DELTA_CHUNK in csrc/delta.h). Each chunk is sent in full or as changes, or omitted if
it is unchanged."""
STEP = 16
"""Required divisor of the length in bytes of encoded data (SLIMX_DELTA_STEP in csrc/delta.h)."""
ITEMS = (1, 2)
"""Supported element sizes in bytes: 1 for fp8 codes, 2 for bf16. Wider values are compared as two or more elements."""


def room(nbytes: int) -> int:
    """Returns the maximum size in bytes of a frame for data of `nbytes` bytes."""
    return 4 * (-(-nbytes // CHUNK)) + nbytes


def encode(
    base: torch.Tensor | None, fresh: torch.Tensor, frame: torch.Tensor, *, item: int, threads: int | None = None
) -> int:
    """Encodes into `frame` the changes from `base` to `fresh`, both uint8 [bytes] in host memory; returns the frame's
    length in bytes.

    `frame`: uint8 [room(bytes)] or longer. `base`: None to encode `fresh` in full. `item`: element size in bytes.
    `threads`: None for torch's number of threads."""
    nbytes = _check(fresh, item)
    if base is not None and _check(base, item) != nbytes:
        raise _invalid(f"tensors of {base.numel()} bytes and {nbytes} bytes")
    if _memory(frame) < room(nbytes):
        raise _invalid(f"tensors of {nbytes} bytes with a frame of only {frame.numel()} bytes")
    length = np.zeros(1, np.int64)
    cpu.library().slimx_delta_encode(
        None if base is None else base.data_ptr(),
        fresh.data_ptr(),
        nbytes,
        item,
        frame.data_ptr(),
        length.ctypes.data,
        cpu.threads_of(threads),
    )
    return int(length[0])


def apply(frame: torch.Tensor, base: torch.Tensor, *, item: int, threads: int | None = None) -> None:
    """Applies `frame` to `base` in place, both uint8 in host memory.

    Raises SlimxError, leaving `base` unchanged, if `frame` is not valid for data of this size with elements of `item`
    bytes."""
    nbytes = _check(base, item)
    status = cpu.library().slimx_delta_apply(
        frame.data_ptr(), _memory(frame), base.data_ptr(), nbytes, item, cpu.threads_of(threads)
    )
    if status:
        raise SlimxError(
            f"a frame of {frame.numel()} bytes cannot be decoded to {nbytes} bytes of {item}-byte elements (decoder "
            f"status {status}); install the same version of slimx on every machine, and publish again",
            code="delta.frame",
            about="frame",
        )


def _check(memory: torch.Tensor, item: int) -> int:
    nbytes = _memory(memory)
    if item not in ITEMS or nbytes % STEP:
        raise _invalid(f"tensors of {nbytes} bytes with elements of {item} bytes")
    return nbytes


def _memory(memory: torch.Tensor) -> int:
    if memory.dtype != torch.uint8 or memory.device.type != "cpu" or not memory.is_contiguous():
        raise _invalid(
            f"a {'' if memory.is_contiguous() else 'non-contiguous '}{memory.dtype} tensor on {memory.device}"
        )
    return memory.numel()


def _invalid(memory: str) -> SlimxError:
    return SlimxError(
        f"{memory} cannot be compared; pass contiguous uint8 CPU tensors whose equal size is a multiple of {STEP} "
        f"bytes, an element size of {' or '.join(map(str, ITEMS))} bytes, and a frame of at least `frames.room(size)` "
        "bytes",
        code="delta.argument",
        about="memory",
    )
