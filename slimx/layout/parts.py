"""Local tensors of ranks, described as rectangles of checkpoint tensors, and checks that these cover every element
once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from slimx.errors import SlimxError
from slimx.layout.maps import Rect, Shape


class Part(NamedTuple):
    """One local tensor of a rank, described by the checkpoint elements that it contains. All ranks in `ranks` store
    identical copies of it."""

    name: str
    """Name of the parameter in the rank's module."""
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    sources: tuple[str, ...]
    """Names of the checkpoint tensors whose elements the tensor contains; `rects[k].source` is an index into them."""
    rects: tuple[Rect, ...]
    dtype: str | None = None
    """Dtype of the tensor; None means the model's dtype."""
    quantized: bool = False
    """True if a publication that quantizes also quantizes this tensor."""
    copy: bool = False
    """True for a second copy of a tensor, which is loaded like the original but never exported or published."""
    column: bool = False
    """True if `rects` address the tensor as a matrix with a single column, regardless of its shape, as for a stack of
    vectors."""
    padded: bool = False
    """True if the tensor has padding, which is in no rectangle."""

    @property
    def matrix(self) -> Shape:
        """Shape (rows, columns) of the matrix as which `rects` address the tensor."""
        return (math.prod(self.shape), 1) if self.column else matrix(self.shape)


def matrix(shape: Sequence[int]) -> Shape:
    """Returns the shape of a tensor as a matrix: n x 1 for vectors, (E * M) x N for stacks of E matrices of M x N."""
    if len(shape) == 1:
        return shape[0], 1
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return rows, shape[-1]


def local_shape(read: Shape, sources: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, ...]:
    """Returns the shape of the local tensor that is made from `sources` (names and shapes) and has the matrix shape
    `read`.

    If all sources are vectors, so is the local tensor. If they have more than two axes, it keeps the axes after the
    first."""
    rows, cols = read
    inner = max((shape[1:-1] for _, shape in sources), key=len)
    if all(len(shape) == 1 for _, shape in sources):
        return (rows,)
    return rows // math.prod(inner), *inner, cols


def check_coverage(shapes: Mapping[str, Sequence[int]], parts: Iterable[Part]) -> None:
    """Raises SlimxError unless `parts`, except copies, contain every element of every checkpoint tensor exactly once.

    `shapes`: checkpoint tensor -> shape. The message names a tensor for which this is not the case."""
    covered: dict[str, list[Rect]] = {name: [] for name in shapes}
    for part in parts:
        if not part.copy:
            for rect in part.rects:
                name = part.sources[rect.source]
                if name not in covered:
                    raise SlimxError(
                        f"weight table: the row of {part.name} uses tensor {name}, which is not in the checkpoint; "
                        "correct the tensor's name in this row",
                        code="table.unknown_tensor",
                        about=name,
                    )
                covered[name].append(rect)
    proven: set[tuple[Shape, tuple[int, ...]]] = set()
    for name, shape in shapes.items():
        # Layers and experts share rectangles, so each set is checked once. `covered` keeps them alive, and ids unique.
        key = matrix(shape), tuple(map(id, covered[name]))
        if key not in proven:
            check_sources(name, matrix(shape), covered[name])
            proven.add(key)


def check_sources(name: str, shape: Shape, rects: Iterable[Rect]) -> None:
    """Raises SlimxError unless `rects` cover every element of the checkpoint tensor `name`, of matrix shape `shape`,
    exactly once."""
    boxes = []
    for r in rects:
        if r.step == 1:
            boxes.append((r.row, r.col, r.rows, r.cols))
        else:
            boxes.extend((r.row + k * r.step, r.col, 1, r.cols) for k in range(r.rows))
    check_boxes(f"weight table: {name}", shape, np.array(boxes, dtype=np.int64).reshape(-1, 4))


def check_boxes(name: str, shape: Shape, boxes: np.ndarray, *, padded: bool = False) -> None:
    """Raises SlimxError unless `boxes`, [n, 4] of (row, col, rows, cols), cover a matrix of `shape` exactly once, or
    with `padded` at most once.

    The edges of the boxes divide the matrix into cells, and each cell must be in exactly one box. The message contains
    `name` and the position of the first cell that is not."""
    boxes = boxes[(boxes[:, 2] > 0) & (boxes[:, 3] > 0)]
    ends = boxes[:, :2] + boxes[:, 2:]
    if len(boxes) and (boxes.min() < 0 or (ends > shape).any()):
        raise SlimxError(
            f"{name} has {shape[0]} rows and {shape[1]} columns, but a map addresses elements "
            "outside them; correct the bounds of the map",
            code="table.beyond",
            about=name,
        )
    rows = np.unique(np.concatenate([[0, shape[0]], boxes[:, 0], ends[:, 0]]))
    cols = np.unique(np.concatenate([[0, shape[1]], boxes[:, 1], ends[:, 1]]))
    # Each box changes the two-dimensional difference array at its four corners; the cumulative sums count boxes.
    count = np.zeros((len(rows), len(cols)), dtype=np.int32)
    top = np.searchsorted(rows, boxes[:, 0])
    bottom = np.searchsorted(rows, ends[:, 0])
    left = np.searchsorted(cols, boxes[:, 1])
    right = np.searchsorted(cols, ends[:, 1])
    for row, col, sign in ((top, left, 1), (bottom, left, -1), (top, right, -1), (bottom, right, 1)):
        np.add.at(count, (row, col), sign)
    count = count.cumsum(0).cumsum(1)[:-1, :-1]
    for wrong, code, problem in (
        (count > 1, "table.overlap", "cover more than once"),
        (count < 1 - padded, "table.coverage", "do not cover"),
    ):
        if wrong.any():
            row, col = np.argwhere(wrong)[0]
            raise SlimxError(
                f"{name} has an element (row {rows[row]}, column {cols[col]}) that the maps {problem}; "
                "change the maps so that they cover each element exactly once",
                code=code,
                about=name,
            )
