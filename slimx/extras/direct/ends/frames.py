"""Frames of what has changed between two versions of the same bytes (`csrc/delta.h`).

A frame comes from another process: `apply` checks every
size and mask in it before it writes the first byte.
"""

from __future__ import annotations

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cpu

CHUNK = 65536
"""SLIMX_DELTA_CHUNK: bytes that are sent whole, by their changes, or not at all."""
STEP = 16
"""SLIMX_DELTA_STEP: bytes of which the length of framed data is a multiple."""
ITEMS = (1, 2)
"""Bytes of an element: fp8 codes, bf16. Wider values are counted as two elements, or more."""


def room(nbytes: int) -> int:
    """Bytes that a frame of `nbytes` takes at most."""
    return 4 * (-(-nbytes // CHUNK)) + nbytes


def encode(
    base: torch.Tensor | None, fresh: torch.Tensor, frame: torch.Tensor, *, item: int, threads: int | None = None
) -> int:
    """Write the frame that makes `fresh` of `base`, both uint8 [bytes] of the host, into `frame`, uint8 with `room`;
    its bytes. `base`: None for a frame that needs none."""
    nbytes = _check(fresh, item)
    if base is not None and _check(base, item) != nbytes:
        raise _odd(f"{base.numel()} bytes that are compared with {nbytes}")
    if _memory(frame) < room(nbytes):
        raise _odd(f"a frame of {frame.numel()} bytes for {nbytes}")
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
    """Make of `base`, uint8 [bytes], what `frame`, uint8 [its bytes], was made for.

    Raises SlimxError, with `base` as it was, for any other than a frame of so many bytes and such elements.
    """
    nbytes = _check(base, item)
    status = cpu.library().slimx_delta_apply(
        frame.data_ptr(), _memory(frame), base.data_ptr(), nbytes, item, cpu.threads_of(threads)
    )
    if status:
        raise SlimxError(
            f"{frame.numel()} bytes that came are no changes of {nbytes} bytes in elements of {item} (status "
            f"{status}); run the same slimx on every machine, and publish again",
            code="delta.frame",
            about="frame",
        )


def _check(memory: torch.Tensor, item: int) -> int:
    nbytes = _memory(memory)
    if item not in ITEMS or nbytes % STEP:
        raise _odd(f"{nbytes} bytes in elements of {item}")
    return nbytes


def _memory(memory: torch.Tensor) -> int:
    if memory.dtype != torch.uint8 or memory.device.type != "cpu" or not memory.is_contiguous():
        raise _odd(f"{memory.dtype} on {memory.device}")
    return memory.numel()


def _odd(what: str) -> SlimxError:
    return SlimxError(
        f"changes cannot be found in {what}: pass contiguous uint8 memory of equal sizes, a multiple of {STEP} bytes, "
        f"and elements of {' or '.join(map(str, ITEMS))} bytes",
        code="delta.argument",
        about="memory",
    )
