"""Sources from which a conversion reads tensors, slice by slice, with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Protocol

import torch

from slimx.layout.maps import Rect
from slimx.layout.parts import matrix

Shape = tuple[int, ...]
Advance = Callable[[int], None]
"""Callback that receives the number of bytes processed since its previous call."""
BLOCK_BYTES = 32 * 2**20
"""Approximate size in bytes of the blocks in which tensors are processed."""
MAPPED_BYTES = 128 * 2**20
"""Number of bytes read through a source's memory maps after which its files are reopened, because pages that have been
read stay in memory until then."""


class TensorSource(Protocol):
    """Source from which tensors are read by their Hugging Face names."""

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which `read` returns the tensor `name`."""
        ...

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """Reads the elements `rect` of the tensor `name`, [rect.rows, rect.cols]. The result may refer to a
        memory-mapped file."""
        ...

    def reopened(self) -> TensorSource:
        """Returns a copy of the source that has no file open."""
        ...


class Scratch:
    """Reusable memory of one thread. Without it, allocating and freeing blocks of many sizes would fragment the heap by
    gigabytes."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor that reuses the memory of the one that the previous call returned. Its
        storage is as large as the tensor, because `torch.save` writes complete storages."""
        count = prod(shape)
        if count * dtype.itemsize > len(self._memory):
            self._memory = bytearray(count * dtype.itemsize)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


class Reading:
    """View of a source for one thread; keeps only a limited part of the source's files in memory."""

    def __init__(self, source: TensorSource):
        self._source = source.reopened()
        self._bytes = 0
        self.scratch = Scratch()
        """Reusable memory for converted tensors."""

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which `read` returns the tensor `name`."""
        return self._source.dtype(name)

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """Reads the elements `rect` of the tensor `name`, [rect.rows, rect.cols]. The caller must drop the result
        before the next call, so that the file from which it was read can be closed."""
        if self._bytes > MAPPED_BYTES:
            self._source = self._source.reopened()
            self._bytes = 0
        part = self._source.read(name, rect)
        self._bytes += part.nbytes
        return part


def row_blocks(shape: Shape, itemsize: int, multiple: int = 1) -> Iterator[Rect]:
    """Yields the rows of a tensor in order, in blocks of about BLOCK_BYTES. `itemsize`: size in bytes of an element.

    The number of rows in a block is a multiple of `multiple`, except for the last block of a matrix. No block spans two
    matrices of a stack."""
    rows, cols = matrix(shape)
    single = shape[-2] if len(shape) == 3 and shape[-2] > 1 else rows  # a convolution has one row per channel
    step = max(1, BLOCK_BYTES // max(1, cols * itemsize) // multiple) * multiple
    for first in range(0, rows, single):
        for row in range(first, first + single, step):
            yield Rect(0, row, 0, min(step, first + single - row), cols, 0, 0)
