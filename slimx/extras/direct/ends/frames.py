"""Frames of changes between two versions of the same bytes (`csrc/delta.h`).

A frame comes from another process: `apply` checks every size and mask in it before it writes the first byte."""

from __future__ import annotations

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cpu

CHUNK = 65536
"""SLIMX_DELTA_CHUNK: bytes that are sent in full, as changes, or not at all."""
STEP = 16
"""SLIMX_DELTA_STEP: the length of framed data is a multiple of this number of bytes."""
ITEMS = (1, 2)
"""Bytes of an element: fp8 codes, bf16. Wider values count as two or more elements."""


def room(nbytes: int) -> int:
    """Returns the maximum bytes of a frame of `nbytes`."""
    return 4 * (-(-nbytes // CHUNK)) + nbytes


def encode(
    base: torch.Tensor | None, fresh: torch.Tensor, frame: torch.Tensor, *, item: int, threads: int | None = None
) -> int:
    """Writes the frame that changes `base` to `fresh`, both uint8 [bytes] on the host, to `frame`, uint8 with `room`.
    Returns its bytes. `base`: None for a frame without a base."""
    nbytes = _check(fresh, item)
    if base is not None and _check(base, item) != nbytes:
        raise _invalid(f"{base.numel()} bytes that are compared with {nbytes}")
    if _memory(frame) < room(nbytes):
        raise _invalid(f"a frame of {frame.numel()} bytes for {nbytes}")
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
    """Applies delta `frame` to `base` in place (both uint8).

    Raises SlimxError, leaving `base` unchanged, if `frame` does not match its size or element type."""
    nbytes = _check(base, item)
    status = cpu.library().slimx_delta_apply(
        frame.data_ptr(), _memory(frame), base.data_ptr(), nbytes, item, cpu.threads_of(threads)
    )
    if status:
        raise SlimxError(
            f"{frame.numel()} received bytes are not changes to {nbytes} bytes in elements of {item} (status "
            f"{status}); run the same slimx on every machine, and publish again",
            code="delta.frame",
            about="frame",
        )


def _check(memory: torch.Tensor, item: int) -> int:
    nbytes = _memory(memory)
    if item not in ITEMS or nbytes % STEP:
        raise _invalid(f"{nbytes} bytes in elements of {item}")
    return nbytes


def _memory(memory: torch.Tensor) -> int:
    if memory.dtype != torch.uint8 or memory.device.type != "cpu" or not memory.is_contiguous():
        raise _invalid(f"{memory.dtype} on {memory.device}")
    return memory.numel()


def _invalid(memory: str) -> SlimxError:
    return SlimxError(
        f"cannot compare {memory}: pass contiguous uint8 memory of equal sizes, a multiple of {STEP} bytes, and "
        f"elements of {' or '.join(map(str, ITEMS))} bytes",
        code="delta.argument",
        about="memory",
    )
