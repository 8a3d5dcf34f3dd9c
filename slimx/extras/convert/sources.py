"""Sources of a conversion's tensors, read slice by slice with a bounded part in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Protocol

import torch

from slimx.layout.maps import Rect
from slimx.layout.parts import matrix

Shape = tuple[int, ...]
Advance = Callable[[int], None]
"""Called with the number of bytes that are done after the call before."""
BLOCK_BYTES = 32 * 2**20
"""About what is held of one tensor at a time."""
MAPPED_BYTES = 128 * 2**20
"""Bytes that are read from a source's files before they are opened anew: they are mapped, and what was read stays in
memory until they are closed."""


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which `read` returns a tensor."""
        ...

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """The elements of a tensor that `rect` takes, [rect.rows, rect.cols]; they may lie in a mapped file."""
        ...

    def reopened(self) -> TensorSource:
        """The same with no file open."""
        ...


class Scratch:
    """Memory that one thread uses again and again. Blocks of many sizes, taken from the heap and given back, leave
    holes in it: it would grow to gigabytes."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised; the one before is overwritten. Its storage ends where it ends."""
        count = prod(shape)
        if count * dtype.itemsize > len(self._memory):
            self._memory = bytearray(count * dtype.itemsize)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


class Reading:
    """A source as one thread reads it for a while: with a bounded part of its files in memory."""

    def __init__(self, source: TensorSource):
        self._source, self._bytes = source.reopened(), 0
        self.scratch = Scratch()
        """Memory for what is made of the parts that were read."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which tensor `name` is stored, as `TensorSource.dtype`."""
        return self._source.dtype(name)

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """Read as `TensorSource.read` does; drop the result before the next call, so that its file can be closed."""
        if self._bytes > MAPPED_BYTES:
            self._source, self._bytes = self._source.reopened(), 0
        part = self._source.read(name, rect)
        self._bytes += part.nbytes
        return part


def row_blocks(shape: Shape, itemsize: int, multiple: int = 1) -> Iterator[Rect]:
    """The rows of a tensor from first to last in blocks of about BLOCK_BYTES that hold a `multiple` of rows, or end
    with their matrix; none reaches from one matrix of a stack into the next."""
    rows, cols = matrix(shape)
    single = shape[-2] if len(shape) == 3 and shape[-2] > 1 else rows  # not of a convolution: a row of each channel
    step = max(1, BLOCK_BYTES // max(1, cols * itemsize) // multiple) * multiple
    for first in range(0, rows, single):
        for row in range(first, first + single, step):
            yield Rect(0, row, 0, min(step, first + single - row), cols, 0, 0)
