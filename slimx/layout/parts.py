"""Parts: the tensors that ranks of any system hold, in terms of checkpoint tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from slimx.errors import SlimxError
from slimx.layout.maps import Rect, Shape


class Part(NamedTuple):
    """One local tensor, with the same bytes on all of `ranks`."""

    name: str
    """Name in the rank's module."""
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    sources: tuple[str, ...]
    """Checkpoint tensors; `rects[k].source` is an index into them."""
    rects: tuple[Rect, ...]
    dtype: str | None = None
    """None: the model's dtype."""
    quantized: bool = False
    """True if block quantization applies to it when a publication quantizes."""
    copy: bool = False
    """True for a second copy of a tensor: loaded like the original, but never exported or published."""
    column: bool = False
    """True if `rects` treat it as one column regardless of its shape: a stack of vectors, each of which is a column."""

    @property
    def matrix(self) -> Shape:
        """Rows and columns in terms of `rects`."""
        return (math.prod(self.shape), 1) if self.column else matrix(self.shape)


def matrix(shape: Sequence[int]) -> Shape:
    """Returns the two-dimensional shape of a tensor: n x 1 for vectors, (E * M) x N for stacks of matrices."""
    if len(shape) == 1:
        return shape[0], 1
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return rows, shape[-1]


def local_shape(read: Shape, sources: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, ...]:
    """Returns the shape of a local tensor that is the matrix `read`, made from `sources` (name and shape). Vectors make
    a vector; tensors with more than two axes keep the axes after the first."""
    rows, cols = read
    inner = max((shape[1:-1] for _, shape in sources), key=len)
    if all(len(shape) == 1 for _, shape in sources):
        return (rows,)
    return rows // math.prod(inner), *inner, cols


def check_coverage(shapes: Mapping[str, Sequence[int]], parts: Iterable[Part]) -> None:
    """Proves that `parts` (copies aside) hold every checkpoint element exactly once. Raises SlimxError naming the
    tensor."""
    covered: dict[str, list[Rect]] = {name: [] for name in shapes}
    for part in parts:
        if not part.copy:
            for rect in part.rects:
                name = part.sources[rect.source]
                if name not in covered:
                    raise SlimxError(
                        f"weight table: {part.name} holds a part of {name}, which is not in the checkpoint",
                        code="table.unknown_tensor",
                        about=name,
                    )
                covered[name].append(rect)
    proven: set[tuple[Shape, tuple[int, ...]]] = set()
    for name, shape in shapes.items():
        # Layers and experts share the same rectangles, which are proven once. `covered` keeps them alive.
        key = matrix(shape), tuple(map(id, covered[name]))
        if key not in proven:
            check_sources(name, matrix(shape), covered[name])
            proven.add(key)


def check_sources(name: str, shape: Shape, rects: Iterable[Rect]) -> None:
    """Proves that `rects` cover every element of checkpoint tensor `name` exactly once."""
    boxes = []
    for r in rects:
        if r.step == 1:
            boxes.append((r.row, r.col, r.rows, r.cols))
        else:
            boxes.extend((r.row + k * r.step, r.col, 1, r.cols) for k in range(r.rows))
    check_boxes(f"weight table: {name}", shape, np.array(boxes, dtype=np.int64).reshape(-1, 4))


def check_boxes(name: str, shape: Shape, boxes: np.ndarray) -> None:
    """Proves that `boxes` [n, 4] of (row, col, rows, cols) cover a matrix exactly once.

    Their edges cut the matrix into cells; each cell must be in exactly one box. Raises SlimxError with `name` and the
    gap."""
    boxes = boxes[(boxes[:, 2] > 0) & (boxes[:, 3] > 0)]
    ends = boxes[:, :2] + boxes[:, 2:]
    if len(boxes) and (boxes.min() < 0 or (ends > shape).any()):
        raise SlimxError(
            f"{name}: a rectangle exceeds its {shape[0]} x {shape[1]} elements", code="table.beyond", about=name
        )
    rows = np.unique(np.concatenate([[0, shape[0]], boxes[:, 0], ends[:, 0]]))
    cols = np.unique(np.concatenate([[0, shape[1]], boxes[:, 1], ends[:, 1]]))
    # Each box adds 1 to its cells by four corners of a two-dimensional difference.
    count = np.zeros((len(rows), len(cols)), dtype=np.int32)
    top = np.searchsorted(rows, boxes[:, 0])
    bottom = np.searchsorted(rows, ends[:, 0])
    left = np.searchsorted(cols, boxes[:, 1])
    right = np.searchsorted(cols, ends[:, 1])
    for row, col, sign in ((top, left, 1), (bottom, left, -1), (top, right, -1), (bottom, right, 1)):
        np.add.at(count, (row, col), sign)
    count = count.cumsum(0).cumsum(1)[:-1, :-1]
    for wrong, code, problem in (
        (count > 1, "table.overlap", "covered twice"),
        (count == 0, "table.coverage", "not covered"),
    ):
        if wrong.any():
            row, col = np.argwhere(wrong)[0]
            raise SlimxError(f"{name} is {problem} at row {rows[row]}, column {cols[col]}", code=code, about=name)
