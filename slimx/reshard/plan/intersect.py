"""Intersects two layouts of a checkpoint tensor: which rectangles are copied from one rank's tensor to another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.parts import check_boxes


class Move(NamedTuple):
    """Copy of a rectangle from a source tensor into a target tensor. For i < rows and j < cols, target element (row + i
    * row_step, col + j) is source element (source_row + i * source_step, source_col + j)."""

    source: int
    """Index of the rectangle in `sources` from which the move reads."""
    source_row: int
    source_col: int
    source_step: int
    row: int
    col: int
    row_step: int
    rows: int
    cols: int


def moves(sources: Sequence[Rect], target: Rect, name: str) -> tuple[Move, ...]:
    """Returns moves that together fill `target` from `sources`, every element exactly once. `sources` and `target` are
    rectangles of the checkpoint tensor `name`.

    Raises SlimxError naming the tensor and the position if an element is in no source or in several."""
    found = []
    for index, source in enumerate(sources):
        move = _meet(index, source, target)
        if move is not None:
            found.append(move)
    boxes = []
    for m in found:
        row = m.row - target.local_row
        col = m.col - target.local_col
        if m.row_step == 1:
            boxes.append((row, col, m.rows, m.cols))
        else:
            boxes.extend((row + k * m.row_step, col, 1, m.cols) for k in range(m.rows))
    check_boxes(
        f"the rectangle of {name} at row {target.row}, column {target.col}",
        (target.rows, target.cols),
        np.array(boxes, dtype=np.int64).reshape(-1, 4),
    )
    return tuple(found)


def check_blocks(name: str, move: Move, rect: Rect, block_shape: tuple[int, int]) -> None:
    """Raises SlimxError unless every quantization block of `move` is a block of the checkpoint's tensor and lies in
    one rectangle of one rank. Otherwise quantized values would depend on parallel sizes."""
    if max(move.row_step, rect.step) > 1:
        raise SlimxError(
            f"{name} cannot be quantized, because publishing reorders its rows; remove publish.quantize",
            code="plan.reordered",
            about=name,
        )
    high, wide = block_shape
    row = rect.row + move.row
    col = rect.col + move.col
    for local, first, start, length, total, block in (
        (rect.local_row + move.row, row, move.row, move.rows, rect.rows, high),
        (rect.local_col + move.col, col, move.col, move.cols, rect.cols, wide),
    ):
        # A rectangle may end inside a block only at the tensor's edge; elsewhere the next would start inside it.
        if local % block or first % block or (length % block and start + length != total):
            raise SlimxError(
                f"a shard of {name}, {move.rows} x {move.cols} at row {row}, column {col}, does not consist of whole "
                f"quantization blocks of {high} x {wide}; choose parallel sizes that split every "
                f"weight only at multiples of {block}",
                code="plan.blocks",
                about=name,
            )


def _meet(index: int, source: Rect, target: Rect) -> Move | None:
    col = max(source.col, target.col)
    stop = min(source.col + source.cols, target.col + target.cols)
    if col >= stop:
        return None
    rows = _common_rows(source, target)
    if rows is None:
        return None
    first, count, step = rows
    return Move(
        index,
        source.local_row + (first - source.row) // source.step,
        source.local_col + col - source.col,
        step // source.step,
        target.local_row + (first - target.row) // target.step,
        target.local_col + col - target.col,
        step // target.step,
        count,
        stop - col,
    )


def _common_rows(a: Rect, b: Rect) -> tuple[int, int, int] | None:
    """Returns (first row, number of rows, step) for the checkpoint tensor's rows that are in both rectangles; None if
    there are none."""
    if a.step != b.step and 1 not in (a.step, b.step):
        raise SlimxError(
            f"rectangles with row steps {a.step} and {b.step} cannot be intersected; use equal steps, or one step of 1",
        )
    step = max(a.step, b.step)
    if a.step == b.step and (a.row - b.row) % step:
        return None
    coarse, fine = (a, b) if a.step >= b.step else (b, a)
    low = max(a.row, b.row)
    first = coarse.row + -(-(low - coarse.row) // step) * step
    last = min(coarse.row + (coarse.rows - 1) * coarse.step, fine.row + (fine.rows - 1) * fine.step)
    return (first, (last - first) // step + 1, step) if first <= last else None
