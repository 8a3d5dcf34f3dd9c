"""Every index map says what torch would cut and join, and a row whose map loses or repeats an element is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from slimx.layout.maps import (
    Blocks,
    Concat,
    Copy,
    Cut,
    Fused,
    IndexMap,
    InterleaveQKV,
    Pad,
    Rect,
    RotateHalf,
    Sections,
    Shape,
)
from slimx.layout.parts import Part, matrix
from slimx.layout.table import Row, Table
from tests.refusals import numbers, refused
from tests.unit.layout.layout_stand import fill

Torch = Callable[[list[torch.Tensor], int, int], torch.Tensor]
"""A rank's part of the tensors: (tensors, rank, size) -> tensor."""


def numbered(shapes: list[Shape]) -> list[torch.Tensor]:
    """Returns matrices whose elements are numbered from 1, through all of them."""
    out, start = [], 1
    for rows, cols in shapes:
        out.append(torch.arange(start, start + rows * cols).view(rows, cols))
        start += rows * cols
    return out


def local(map: IndexMap, tensors: list[torch.Tensor], axis: int | None, rank: int, size: int) -> torch.Tensor:
    shape, rects = map.local([tuple(t.shape) for t in tensors], axis, rank, size)
    names = names_of(len(tensors))
    return fill(Part("local", shape, (rank,), names, tuple(rects)), dict(zip(names, tensors, strict=True)))


def names_of(count: int) -> tuple[str, ...]:
    return tuple(f"source{k}" for k in range(count))


def blocks(heads: tuple[int, ...]) -> Torch:
    """Returns a cut by engine ranks: a share of each tensor's heads, or one head that neighbours share."""

    def cut(tensors: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        out = []
        for tensor, count in zip(tensors, heads, strict=True):
            per_head = tensor.view(count, -1, tensor.shape[1])
            repeated = per_head.repeat_interleave(max(1, size // count), dim=0)
            out.append(repeated.chunk(size)[rank].reshape(-1, tensor.shape[1]))
        return torch.cat(out)

    return cut


def interleave(groups: int, head: int) -> Torch:
    def cut(tensors: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        query, key, value = (tensor.view(groups, -1, head, tensor.shape[1]) for tensor in tensors)
        return torch.cat([query, key, value], 1).chunk(size)[rank].reshape(-1, tensors[0].shape[1])

    return cut


def interleave_gated(groups: int, head: int) -> Torch:
    """Returns a cut of a query with a gate behind every head; a group has its heads, their gates, a key and a value."""

    def cut(tensors: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        both, key, value = (tensor.view(groups, -1, head, tensor.shape[1]) for tensor in tensors)
        parts = [both[:, 0::2], both[:, 1::2], key, value]
        return torch.cat(parts, 1).chunk(size)[rank].reshape(-1, tensors[0].shape[1])

    return cut


def sections(tensors: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    """Orders two tensors of four heads with (2, 3) and (1, 1) rows of two kinds each: by kind, of the rank's heads."""
    kinds = []
    for tensor, rows in zip(tensors, ((2, 3), (1, 1)), strict=True):
        heads = tensor.view(4, sum(rows), tensor.shape[1]).chunk(size)[rank]
        kinds += [part.reshape(-1, tensor.shape[1]) for part in heads.split(rows, dim=1)]
    return torch.cat(kinds)


BY_HEAD = Sections(4, (Cut(0, 0, 2, 5), Cut(0, 2, 3, 5), Cut(1, 0, 1, 2), Cut(1, 1, 1, 2)))
BY_KIND = Sections(4, (Cut(0, 0, 2, 2), Cut(0, 8, 3, 3), Cut(1, 0, 1, 1)))
"""Sections of one tensor with both kinds, one behind the other, and of one with a row per head."""


def rotate(head: int, rotary: int, offset: int) -> Torch:
    def cut(tensors: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        heads = tensors[0].view(-1, head, tensors[0].shape[1]).chunk(size)[rank]
        before, pairs, after = heads.split([offset, rotary, head - offset - rotary], dim=1)
        halves = torch.cat([pairs[:, 0::2], pairs[:, 1::2]], dim=1)
        return torch.cat([before, halves, after], dim=1).reshape(-1, tensors[0].shape[1])

    return cut


def pad(multiple: int) -> Torch:
    def cut(tensors: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        rows, cols = tensors[0].shape
        # SGLang: to a multiple, and to a multiple times the ranks where they could not share that.
        padded = next(n for n in itertools.count(rows) if n % multiple == 0)
        if padded % size:
            padded = next(n for n in itertools.count(rows) if n % (multiple * size) == 0)
        return torch.cat([tensors[0], torch.zeros(padded - rows, cols, dtype=torch.int64)]).chunk(size)[rank]

    return cut


CASES: dict[str, tuple[IndexMap, list[Shape], int | None, Torch]] = {
    "copy": (Copy(), [(12, 5)], None, lambda t, rank, size: t[0]),
    "copy by rows": (Copy(), [(12, 5)], 0, lambda t, rank, size: t[0].chunk(size)[rank]),
    "copy by columns": (Copy(), [(5, 12)], 1, lambda t, rank, size: t[0].chunk(size, 1)[rank]),
    "concat": (Concat(), [(4, 5), (8, 5)], None, lambda t, rank, size: torch.cat(t)),
    "concat by rows": (
        Concat(),
        [(4, 5), (12, 5), (8, 5)],
        0,
        lambda t, rank, size: torch.cat([x.chunk(size)[rank] for x in t]),
    ),
    "blocks": (Blocks((8, 4, 4)), [(24, 5), (12, 5), (12, 5)], 0, blocks((8, 4, 4))),
    "blocks with fewer heads than ranks": (Blocks((8, 2, 2)), [(24, 5), (6, 5), (6, 5)], 0, blocks((8, 2, 2))),
    "blocks of one head": (Blocks((4, 1)), [(12, 5), (7, 5)], 0, blocks((4, 1))),
    "blocks held whole": (Blocks((1, 1)), [(9, 5), (7, 5)], None, lambda t, rank, size: torch.cat(t)),
    "interleaved": (InterleaveQKV(8, 4, 3), [(24, 5), (12, 5), (12, 5)], 0, interleave(4, 3)),
    "interleaved of as many groups as heads": (InterleaveQKV(4, 4, 3), [(12, 5)] * 3, 0, interleave(4, 3)),
    "interleaved in one group": (
        InterleaveQKV(4, 1, 3),
        [(12, 5), (3, 5), (3, 5)],
        None,
        lambda t, rank, size: torch.cat(t),
    ),
    "interleaved held whole": (
        InterleaveQKV(8, 2, 3),
        [(24, 5), (6, 5), (6, 5)],
        None,
        lambda t, rank, size: interleave(2, 3)(t, 0, 1),
    ),
    "interleaved with gates": (
        InterleaveQKV(8, 4, 3, gated=True),
        [(48, 5), (12, 5), (12, 5)],
        0,
        interleave_gated(4, 3),
    ),
    "fused and interleaved": (
        Fused(InterleaveQKV(8, 4, 3), (24, 12, 12)),
        [(48, 5)],
        0,
        lambda t, rank, size: interleave(4, 3)(list(t[0].split((24, 12, 12))), rank, size),
    ),
    "fused blocks with fewer heads than ranks": (
        Fused(Blocks((8, 2, 2)), (24, 6, 6)),
        [(36, 5)],
        0,
        lambda t, rank, size: blocks((8, 2, 2))(list(t[0].split((24, 6, 6))), rank, size),
    ),
    "fused held whole": (Fused(Blocks((8, 4)), (24, 12)), [(36, 5)], None, lambda t, rank, size: t[0]),
    "sections of tensors by head": (BY_HEAD, [(20, 5), (8, 5)], 0, sections),
    "sections of tensors by kind": (
        BY_KIND,
        [(20, 5), (4, 5)],
        0,
        lambda t, rank, size: torch.cat(
            [kind.chunk(size)[rank] for kind in (t[0][:8], t[0][8:], t[1])],
        ),
    ),
    "sections held whole": (BY_HEAD, [(20, 5), (8, 5)], None, lambda t, rank, size: sections(t, 0, 1)),
    "rotated": (RotateHalf(6, 6), [(24, 5)], 0, rotate(6, 6, 0)),
    "rotated behind others": (RotateHalf(7, 4, 3), [(28, 5)], 0, rotate(7, 4, 3)),
    "rotated between others": (RotateHalf(9, 4, 2), [(36, 5)], 0, rotate(9, 4, 2)),
    "rotated held whole": (RotateHalf(6, 2, 1), [(18, 5)], None, lambda t, rank, size: rotate(6, 2, 1)(t, 0, 1)),
    "padded": (Pad(8), [(20, 5)], None, lambda t, rank, size: pad(8)(t, 0, 1)),
    "padded by rows": (Pad(8), [(20, 5)], 0, pad(8)),
    "padded for ranks that do not share the multiple": (Pad(3), [(7, 5)], 0, pad(3)),
    "padded beyond the last ranks": (Pad(64), [(20, 5)], 0, pad(64)),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_map_makes_what_torch_cuts_and_joins(case: str, size: int):
    map, shapes, axis, make = CASES[case]
    tensors = numbered(shapes)
    for rank in range(size):
        assert torch.equal(local(map, tensors, axis, rank, size), make(tensors, rank, size)), rank


@pytest.mark.parametrize("case", CASES)
def test_a_row_of_every_map_is_proven_invertible_when_its_table_is_made(case: str):
    map, shapes, axis, _ = CASES[case]
    sources = tuple(zip(names_of(len(shapes)), shapes, strict=True))
    Table((Row("row", sources, map, axis),), layers=1, experts=0)
    Table((Row("row", tuple((f"{n}.{{expert}}", s) for n, s in sources), map, axis),), layers=1, experts=3)


def test_experts_that_claim_one_checkpoint_tensor_are_refused():
    with refused("table.overlap", about="weight table: experts.weight"):
        Table((Row("weight{expert}", (("experts.weight", (3, 4, 5)),), Copy()),), layers=1, experts=2)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("map", "shapes", "axis", "size", "about", "length", "ranks"),
    [
        (Copy(), [(10, 6)], 0, 4, "a dimension", 10, 4),
        (Copy(), [(8, 6)], 1, 4, "a dimension", 6, 4),
        (Concat(), [(8, 6), (6, 6)], 0, 4, "a dimension", 6, 4),
        (Blocks((6, 2)), [(12, 6), (4, 6)], 0, 4, "the number of heads", 6, 4),
        (Blocks((6, 4)), [(12, 6), (8, 6)], 0, 6, "the number of ranks", 6, 4),
        (InterleaveQKV(4, 2, 3), [(12, 6), (6, 6), (6, 6)], 0, 4, "the number of query groups", 2, 4),
        (Fused(InterleaveQKV(4, 2, 3), (12, 6, 6)), [(24, 6)], 0, 4, "the number of query groups", 2, 4),
        (RotateHalf(6, 4), [(18, 6)], 0, 2, "the number of heads", 3, 2),
        (BY_KIND, [(20, 6), (4, 6)], 0, 3, "the number of blocks", 4, 3),
    ],
)
def test_a_share_that_does_not_divide_is_refused_with_the_numbers(map, shapes, axis, size, about, length, ranks):
    with refused("maps.share", about=about) as caught:
        map.local(shapes, axis, 0, size)
    assert numbers(caught.value) == [length, ranks]


@pytest.mark.parametrize(
    ("map", "shapes", "about"),
    [
        (Concat(), [(8, 6), (6, 6)], "concatenation"),
        (RotateHalf(6, 4), [(18, 6)], "rotary rows"),
        (BY_KIND, [(20, 6), (4, 6)], "sections"),
    ],
)
def test_rows_that_are_reordered_are_not_split_over_columns(map, shapes, about):
    with refused("maps.columns", about=about):
        map.local(shapes, 1, 0, 2)


@dataclass(frozen=True)
class Wrong:
    """A map that returns the given rectangles for every request."""

    shape: Shape
    rects: tuple[Rect, ...]

    def local(self, shapes, axis, rank, size):
        return self.shape, list(self.rects)


WHOLE = Rect(0, 0, 0, 8, 6, 0, 0)
LOCAL, STORED = "weight table: local.weight", "weight table: model.weight"
WRONG: dict[str, tuple[Shape, tuple[Rect, ...], str, str, list[int]]] = {
    "a row of the checkpoint left out": ((7, 6), (WHOLE._replace(rows=7),), "table.coverage", STORED, [7, 0]),
    "a column left out": ((8, 5), (WHOLE._replace(cols=5),), "table.coverage", STORED, [0, 5]),
    "a row of the local tensor left out": (
        (9, 6),
        (WHOLE._replace(rows=4), WHOLE._replace(row=4, rows=4, local_row=5)),
        "table.coverage",
        LOCAL,
        [4, 0],
    ),
    "an overlap in the local tensor": (
        (7, 6),
        (WHOLE._replace(rows=4), WHOLE._replace(row=4, rows=4, local_row=3)),
        "table.overlap",
        LOCAL,
        [3, 0],
    ),
    "an element read twice": (
        (9, 6),
        (WHOLE._replace(rows=4), WHOLE._replace(row=3, rows=5, local_row=4)),
        "table.overlap",
        STORED,
        [3, 0],
    ),
    "a gap and an overlap of the same size": (
        (8, 6),
        (WHOLE._replace(rows=4), WHOLE._replace(row=3, rows=4, local_row=4)),
        "table.overlap",
        STORED,
        [3, 0],
    ),
    "beyond the last row": ((8, 6), (WHOLE._replace(row=1),), "table.beyond", STORED, [8, 6]),
    "before the first column": ((8, 6), (WHOLE._replace(col=-1),), "table.beyond", STORED, [8, 6]),
    "beyond the local tensor": ((7, 6), (WHOLE,), "table.beyond", LOCAL, [7, 6]),
    "every second row twice": (
        (8, 6),
        (WHOLE._replace(rows=4, step=2), WHOLE._replace(rows=4, local_row=4, step=2)),
        "table.overlap",
        STORED,
        [0, 0],
    ),
    "steps beyond the last row": (
        (8, 6),
        (WHOLE._replace(rows=4, step=2), WHOLE._replace(row=2, rows=4, local_row=4, step=2)),
        "table.beyond",
        STORED,
        [8, 6],
    ),
    "no rectangle at all": ((8, 6), (), "table.coverage", LOCAL, [0, 0]),
}
"""A tensor's shape, what a map says of it, and the refusal: code, tensor, and the place or the size."""


@pytest.mark.parametrize("case", WRONG)
def test_a_map_that_cannot_be_inverted_is_refused_by_name_and_place(case: str):
    shape, rects, code, about, place = WRONG[case]
    with refused(code, about=about) as caught:
        Table((Row("local.weight", (("model.weight", (8, 6)),), Wrong(shape, rects)),), layers=1, experts=0)
    assert numbers(caught.value) == place


@pytest.mark.parametrize(("shape", "dtype"), [((8, 6), "float32"), ((8,), None)])
def test_a_quantized_row_holds_matrices_in_the_models_dtype(shape: tuple[int, ...], dtype: str | None):
    with refused("table.quantized", about="local.weight"):
        row = Row("local.weight", (("model.weight", shape),), quantized=True, dtype=dtype)
        Table((row,), layers=1, experts=0)


def test_a_padded_row_must_still_hold_all_that_it_pads():
    """Rows that no rectangle fills are allowed for Pad only."""
    assert matrix((3, 4, 5)) == (12, 5) and matrix((7,)) == (7, 1)
    shape, rects = Pad(8).local([(20, 5)], 0, 3, 4)
    assert shape == (6, 5) and rects == [Rect(0, 18, 0, 2, 5, 0, 0)]
    assert Pad(64).local([(20, 5)], 0, 2, 4) == ((16, 5), [])
    gap = Gap(8)
    Table((Row("local.weight", (("model.weight", (8, 6)),), gap, axis=0),), layers=1, experts=0)
    with refused("table.coverage", about=STORED):
        Table((Row("local.weight", (("model.weight", (9, 6)),), gap, axis=0),), layers=1, experts=0)
    with refused("table.coverage", about=LOCAL):
        wrong = Wrong(*gap.local([(8, 6)], 0, 0, 1))
        Table((Row("local.weight", (("model.weight", (8, 6)),), wrong),), layers=1, experts=0)


class Gap(Pad):
    """Eight rows with one row of padding between the fourth and the fifth."""

    def local(self, shapes, axis, rank, size):
        return (9, 6), [Rect(0, 0, 0, 4, 6, 0, 0), Rect(0, 4, 0, 4, 6, 5, 0)]
