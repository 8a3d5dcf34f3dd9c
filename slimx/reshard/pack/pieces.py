"""A plan's moves as the kernels' records: addresses in one rank's parameters, places in a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.layout.number_formats import ITEMSIZE, Quantisation
from slimx.layout.parts import matrix
from slimx.reshard.kernels.record import OP, PIECE, RULE, scale_bytes, written_cols
from slimx.reshard.plan.copy_plan import Bucket, Plan

PAGE = 4096
"""Bytes: each target's region of a bucket starts on a page, so that an engine rank can map its own alone."""


class BucketForm:
    """All targets' regions of one bucket, as columns over its tensors."""

    def __init__(self, buckets: list[Bucket], *, apart: bool = False):
        """`apart`: each region in memory of its own, instead of one after another in one."""
        self.first = np.cumsum([0] + [len(bucket.tensors) for bucket in buckets])
        """Number of the first tensor of each target, counted through the bucket."""
        self.bases: list[int] = []
        self.size = 0
        """Bytes of the memory; apart, of that for the largest region."""
        for bucket in buckets:
            region = -(-bucket.size // PAGE) * PAGE
            self.bases.append(0 if apart else self.size)
            self.size = max(self.size, region) if apart else self.size + region
        self.tensors = [tensor for bucket in buckets for tensor in bucket.tensors]
        bases = [base for base, bucket in zip(self.bases, buckets, strict=True) for _ in bucket.tensors]
        self.offset = np.array([base + t.offset for base, t in zip(bases, self.tensors, strict=True)], dtype=np.int64)
        self.width = np.array([t.width for t in self.tensors], dtype=np.int64)
        self.item = np.array([ITEMSIZE[t.dtype] for t in self.tensors], dtype=np.int64)
        self.nbytes = np.array([t.nbytes for t in self.tensors], dtype=np.int64)
        self.dtype = np.array([t.dtype for t in self.tensors])


class PlannedBuckets:
    """A plan with the forms of its buckets, each made once."""

    def __init__(self, plan: Plan, *, apart: bool = False):
        """`apart`: as in `BucketForm`."""
        self.plan, self.apart = plan, apart
        self._forms: dict[int, BucketForm] = {}

    def form(self, bucket: int) -> BucketForm:
        """The layout of `bucket`."""
        if bucket not in self._forms:
            self._forms[bucket] = BucketForm([target[bucket] for target in self.plan.buckets], apart=self.apart)
        return self._forms[bucket]

    def forms(self) -> list[dict[str, str]]:
        """Per target every tensor that it receives: name -> "dtype:d0,d1"."""
        return [
            {t.name: f"{t.dtype}:{','.join(map(str, t.shape))}" for bucket in target for t in bucket.tensors}
            for target in self.plan.buckets
        ]


def pieces_of(
    plan: Plan, moves: np.ndarray, form: BucketForm, parameters: Mapping[str, torch.Tensor] | None
) -> np.ndarray:
    """Records [moves] of `PIECE` that read `parameters` and write into a bucket of `form`.

    The records hold the parameters' addresses: they stay valid as long as these keep their memory. Without parameters
    (another rank's) the sources count from address 0.
    """
    out = np.zeros(len(moves), dtype=PIECE)
    if not len(moves):
        return out
    numbers, inverse = np.unique(moves["parameter"], return_inverse=True)
    source = [_source(plan, int(number), parameters) for number in numbers]
    base, ld, item = (np.array(column, dtype=np.int64)[inverse] for column in zip(*source, strict=True))
    rows_first = base + (moves["source_row"] * ld + moves["source_col"]) * item
    tensor = form.first[moves["target"]] + moves["tensor"]
    width, size = form.width[tensor], form.item[tensor]
    wanted, col, quantisation = form.dtype[tensor], moves["col"], plan.precision.quantisation
    if quantisation is not None:
        codes = wanted == quantisation.code_dtype
        col = np.where(codes, col // quantisation.per_code, col)
    place = (moves["row"] * width + col) * size

    out["src"] = rows_first
    out["src_ld"], out["src_step"] = ld * item * moves["source_step"], item
    out["dst"], out["pos"] = form.offset[tensor] + place, place
    out["dst_ld"] = out["pos_ld"] = width * size * moves["row_step"]
    out["rows"], out["cols"] = moves["rows"], moves["cols"]
    out["tensor"], out["scale_tensor"] = tensor, -1
    out["item"], out["out"] = item, size

    held = np.array([plan.parameters[int(number)].dtype for number in numbers])[inverse]
    out["op"] = np.select(
        [wanted == held, wanted == "bfloat16", wanted == "float32"],
        [OP.COPY_CHECKED, OP.FP32_TO_BF16, OP.BF16_TO_FP32],
        OP.QUANTISE_FP8,
    )
    if quantisation is not None:
        _quantise(quantisation, moves, form, tensor, codes, out)
    return out


def _quantise(
    quantisation: Quantisation,
    moves: np.ndarray,
    form: BucketForm,
    tensor: np.ndarray,
    chosen: np.ndarray,
    out: np.ndarray,
) -> None:
    """Fill in what the pieces among `chosen` need: op, rule, block, and the place of their scales."""
    high, wide = quantisation.block
    scales = tensor[chosen] + 1  # a tensor's scales follow it
    width, size = form.width[scales], form.item[scales]
    place = (moves["row"][chosen] // high * width + moves["col"][chosen] // wide) * size
    out["op"][chosen] = OP[quantisation.operation]
    out["rule"][chosen] = RULE[quantisation.rule.upper()]
    out["block_rows"][chosen], out["block_cols"][chosen] = high, wide
    out["scale_tensor"][chosen] = scales
    out["scale"][chosen], out["scale_pos"][chosen] = form.offset[scales] + place, place
    out["scale_ld"][chosen] = out["scale_pos_ld"][chosen] = width * size


def compact(pieces: np.ndarray) -> tuple[np.ndarray, int]:
    """The same pieces written one after another, each with its scales behind it, and the bytes of all together.

    All start at a multiple of 16 bytes, the widest access of the kernels."""
    out = pieces.copy()
    values, scales = _compact_bytes(pieces)
    ends = np.cumsum(values + scales)
    out["dst"], out["dst_ld"] = ends - values - scales, _row_bytes(pieces)
    out["scale"], out["scale_ld"] = ends - scales, _scale_row_bytes(pieces)
    return out, int(ends[-1]) if len(ends) else 0


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a run that is packed at once, in memory of its own."""

    pieces: np.ndarray
    """Records that write it, from byte 0 of that memory on."""
    size: int
    """Bytes of the memory."""
    copies: tuple[tuple[int, int, int], ...]
    """(byte in the memory, byte in the run, bytes) of what it brings to the run."""


def portions(pieces: np.ndarray, limit: int) -> Iterator[Portion]:
    """Cut the run of `compact(pieces)` into portions of at most `limit` bytes: whole pieces that follow one another, or
    rows of a piece that is longer. Only a row of blocks that is longer by itself makes a longer one."""
    packed, _ = compact(pieces)
    nbytes = run_bytes(pieces)
    ends, first = np.cumsum(nbytes), 0
    while first < len(packed):
        if nbytes[first] > limit:
            yield from _row_portions(packed[first : first + 1], limit)
            first += 1
            continue
        base = ends[first] - nbytes[first]
        stop = int(np.searchsorted(ends, base + limit, side="right"))
        part, size = packed[first:stop].copy(), int(ends[stop - 1] - base)
        for place in ("dst", "scale"):
            part[place] -= np.uint64(base)
        yield Portion(part, size, ((0, int(base), size),))
        first = stop


def _row_portions(piece: np.ndarray, limit: int) -> Iterator[Portion]:
    """The rows of one piece [1], as `compact` places it."""
    (width,), (scale_width,) = _row_bytes(piece), _scale_row_bytes(piece) * (piece["scale_tensor"] >= 0)
    high = max(1, int(piece["block_rows"][0]))
    rows = max(1, (limit - 32) // int(high * width + scale_width)) * high  # 32: both are padded to 16 bytes
    for row in range(0, int(piece["rows"][0]), rows):
        part = piece.copy()
        part["rows"] = min(rows, int(piece["rows"][0]) - row)
        for place, ld, moved in (
            ("src", "src_ld", row),
            ("pos", "pos_ld", row),
            ("scale_pos", "scale_pos_ld", row // high),
        ):
            part[place] += (moved * piece[ld]).astype(np.uint64)
        (values,), (scales,) = _compact_bytes(part)
        part["dst"], part["scale"] = 0, values
        copies = [(0, int(piece["dst"][0] + np.uint64(row * width)), int(part["rows"][0] * width))]
        if scales:
            blocks = -(-int(part["rows"][0]) // high)
            place = int(piece["scale"][0] + np.uint64(row // high * scale_width))
            copies.append((int(values), place, int(blocks * scale_width)))
        yield Portion(part, int(values + scales), tuple(copies))


def run_bytes(pieces: np.ndarray) -> np.ndarray:
    """Bytes [pieces] that each piece takes in what `compact` makes of it together with others."""
    return sum(_compact_bytes(pieces))


def _compact_bytes(pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [pieces] of the values and of the scales."""
    values, scales = (
        -(-nbytes // 16) * 16
        for nbytes in (pieces["rows"] * _row_bytes(pieces), _scale_rows(pieces) * _scale_row_bytes(pieces))
    )
    return values, scales


def spread(pieces: np.ndarray, run: torch.Tensor) -> np.ndarray:
    """Records that copy what `compact(pieces)` wrote into `run`, uint8 [bytes], to where `pieces` has it."""
    packed, _ = compact(pieces)
    out = []
    for dst, ld, rows, row_bytes in (
        ("dst", "dst_ld", pieces["rows"], _row_bytes(pieces)),
        ("scale", "scale_ld", _scale_rows(pieces), _scale_row_bytes(pieces)),
    ):
        copies = np.zeros(len(pieces), dtype=PIECE)
        copies["src"] = run.data_ptr() + packed[dst]
        copies["src_ld"] = row_bytes
        copies["dst"], copies["dst_ld"] = pieces[dst], pieces[ld]
        copies["pos_ld"] = row_bytes
        copies["rows"], copies["cols"] = rows, row_bytes
        copies["src_step"] = copies["item"] = copies["out"] = 1
        copies["op"], copies["scale_tensor"] = OP.COPY, -1
        out.append(copies[rows > 0])
    return np.concatenate(out)


def _row_bytes(pieces: np.ndarray) -> np.ndarray:
    return written_cols(pieces) * pieces["out"]


def _scale_rows(pieces: np.ndarray) -> np.ndarray:
    return np.where(pieces["scale_tensor"] >= 0, -(-pieces["rows"] // np.maximum(pieces["block_rows"], 1)), 0)


def _scale_row_bytes(pieces: np.ndarray) -> np.ndarray:
    return -(-pieces["cols"] // np.maximum(pieces["block_cols"], 1)) * scale_bytes(pieces)


def _source(plan: Plan, number: int, parameters: Mapping[str, torch.Tensor] | None) -> tuple[int, int, int]:
    """Address, elements per row and bytes per element of a parameter, which must be what the plan was made for."""
    planned = plan.parameters[number]
    if parameters is None:
        return 0, matrix(planned.shape)[1], ITEMSIZE[planned.dtype]
    held = parameters.get(planned.name)
    if held is None:
        raise SlimxError(
            f"this rank has no parameter {planned.name}, which the plan reads; compile it for this layout",
            code="pack.no_parameter",
            about=planned.name,
        )
    found = str(held.dtype).removeprefix("torch."), tuple(held.shape)
    if found != (planned.dtype, planned.shape) or not held.is_contiguous():
        raise SlimxError(
            f"parameter {planned.name} is {found[0]} {list(found[1])}"
            f"{'' if held.is_contiguous() else ', not contiguous'}; the plan was compiled for {planned.dtype} "
            f"{list(planned.shape)}",
            code="pack.parameter",
            about=planned.name,
        )
    return held.data_ptr(), matrix(planned.shape)[1], held.element_size()
