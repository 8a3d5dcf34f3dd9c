"""A range of a tensor's elements as boxes, which checkpoints address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes by dimension."""


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The boxes that together are elements `start` to `end` of a row-major tensor, in their order: of d dimensions at
    most 2 d - 1."""
    if start >= end:
        return
    if len(shape) < 2:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], number: int, start: int, end: int) -> Iterator[Box]:
    before = number * prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - before, end - before):
        yield (number, *offsets), (1, *sizes)
