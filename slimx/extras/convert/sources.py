"""Sources of a conversion's tensors, read slice by slice with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Protocol

import torch

from slimx.layout.maps import Rect
from slimx.layout.parts import matrix

Shape = tuple[int, ...]
Advance = Callable[[int], None]
"""Callback with the number of bytes done since the previous call."""
BLOCK_BYTES = 32 * 2**20
"""Approximate memory for one tensor at a time."""
MAPPED_BYTES = 128 * 2**20
"""Bytes that are read from a source's mapped files before they are reopened, because pages that were read stay in
memory until the file is closed."""


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which `read` returns a tensor."""
        ...

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """Reads the elements `rect` of a tensor, [rect.rows, rect.cols]; the result may be in a mapped file."""
        ...

    def reopened(self) -> TensorSource:
        """Returns the same source with no file open."""
        ...


class Scratch:
    """Reusable memory of one thread. Blocks of many sizes, allocated and freed on the heap, would fragment it up to
    gigabytes."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor, overwriting the previous one. Its storage ends where it ends."""
        count = prod(shape)
        if count * dtype.itemsize > len(self._memory):
            self._memory = bytearray(count * dtype.itemsize)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


class Reading:
    """A source as read by one thread, with a bounded part of its files in memory."""

    def __init__(self, source: TensorSource):
        self._source = source.reopened()
        self._bytes = 0
        self.scratch = Scratch()
        """Reusable buffers for converted tensors."""

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of tensor `name`, as `TensorSource.dtype`."""
        return self._source.dtype(name)

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """Reads as `TensorSource.read` does; drop the result before the next call, so that its file can be closed."""
        if self._bytes > MAPPED_BYTES:
            self._source = self._source.reopened()
            self._bytes = 0
        part = self._source.read(name, rect)
        self._bytes += part.nbytes
        return part


def row_blocks(shape: Shape, itemsize: int, multiple: int = 1) -> Iterator[Rect]:
    """Yields the rows of a tensor in order, in blocks of about BLOCK_BYTES with a `multiple` of rows, or up to the end
    of their matrix; no block spans two matrices of a stack."""
    rows, cols = matrix(shape)
    single = shape[-2] if len(shape) == 3 and shape[-2] > 1 else rows  # a convolution has one row per channel
    step = max(1, BLOCK_BYTES // max(1, cols * itemsize) // multiple) * multiple
    for first in range(0, rows, single):
        for row in range(first, first + single, step):
            yield Rect(0, row, 0, min(step, first + single - row), cols, 0, 0)
