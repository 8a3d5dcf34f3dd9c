"""Converts a plan's moves to the kernels' records of pieces: addresses of one rank's parameters, and offsets in a
bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.layout.number_formats import ITEMSIZE, Quantization
from slimx.layout.parts import matrix
from slimx.reshard.kernels.record import OP, PIECE, RULE, scale_bytes, written_cols
from slimx.reshard.plan.copy_plan import Bucket, BucketTensor, Plan

PAGE = 4096
"""Page size in bytes. Each target's region of a bucket starts at a multiple of it, so that an engine rank can map its
region alone."""


class BucketForm:
    """Layout of one bucket in memory: the regions of all targets. Arrays such as `offset` have one element per
    tensor."""

    def __init__(self, buckets: list[Bucket], *, apart: bool = False):
        """Lays out the bucket whose contents for each target are in `buckets`.

        `apart`: True if each region is a separate allocation; otherwise the regions are consecutive in one
        allocation."""
        self.first = np.cumsum([0] + [len(bucket.tensors) for bucket in buckets])
        """Index in `tensors` of each target's first tensor, followed by the total number of tensors, [targets + 1]."""
        self.bases: list[int] = []
        self.size = 0
        """Size in bytes of the bucket's memory; if `apart`, size of each region's allocation, which is that of the
        largest region."""
        self.tensors: list[BucketTensor] = []
        offsets: list[int] = []
        for bucket in buckets:
            region = -(-bucket.size // PAGE) * PAGE
            base = 0 if apart else self.size
            self.bases.append(base)
            self.tensors += bucket.tensors
            offsets += [base + t.offset for t in bucket.tensors]
            self.size = max(self.size, region) if apart else self.size + region
        self.offset = np.array(offsets, dtype=np.int64)
        self.width = np.array([t.width for t in self.tensors], dtype=np.int64)
        self.item = np.array([ITEMSIZE[t.dtype] for t in self.tensors], dtype=np.int64)
        self.nbytes = np.array([t.nbytes for t in self.tensors], dtype=np.int64)
        self.dtype = np.array([t.dtype for t in self.tensors])


class PlannedBuckets:
    """Memory layouts of a plan's buckets, each computed once."""

    def __init__(self, plan: Plan, *, apart: bool = False):
        """Prepares to lay out the buckets of `plan`. `apart`: True if each target's region is a separate allocation
        (`BucketForm`)."""
        self.plan = plan
        self.apart = apart
        self._forms: dict[int, BucketForm] = {}

    def form(self, bucket: int) -> BucketForm:
        """Returns the memory layout of the bucket with index `bucket`."""
        if bucket not in self._forms:
            self._forms[bucket] = BucketForm([target[bucket] for target in self.plan.buckets], apart=self.apart)
        return self._forms[bucket]

    def forms(self) -> list[dict[str, str]]:
        """Returns for each target the tensors that it receives, as {name: "dtype:d0,d1"}."""
        forms = []
        for target in self.plan.buckets:
            tensors = {}
            for bucket in target:
                for t in bucket.tensors:
                    tensors[t.name] = f"{t.dtype}:{','.join(map(str, t.shape))}"
            forms.append(tensors)
        return forms


def pieces_of(
    plan: Plan, moves: np.ndarray, form: BucketForm, parameters: Mapping[str, torch.Tensor] | None
) -> np.ndarray:
    """Returns records, [moves] of `PIECE`, that read one rank's `parameters` and write a bucket laid out as `form`.

    The records contain the parameters' addresses and are valid until a parameter moves in memory. If the parameters
    belong to another rank, `parameters` is None; source addresses are then relative to 0, so only the destinations are
    usable."""
    out = np.zeros(len(moves), dtype=PIECE)
    if not len(moves):
        return out
    indices, inverse = np.unique(moves["parameter"], return_inverse=True)
    sources = [_source(plan, int(index), parameters) for index in indices]
    columns = np.array(sources, dtype=np.int64)[inverse]
    base = columns[:, 0]
    ld = columns[:, 1]
    item = columns[:, 2]
    tensor = form.first[moves["target"]] + moves["tensor"]
    width = form.width[tensor]
    size = form.item[tensor]
    target_dtype = form.dtype[tensor]
    col = moves["col"]
    quantization = plan.precision.quantization
    if quantization is not None:
        codes = target_dtype == quantization.code_dtype
        col = np.where(codes, col // quantization.per_code, col)
    offset = (moves["row"] * width + col) * size

    out["src"] = base + (moves["source_row"] * ld + moves["source_col"]) * item
    out["src_ld"] = ld * item * moves["source_step"]
    out["src_step"] = item
    out["dst"] = form.offset[tensor] + offset
    out["pos"] = offset
    out["dst_ld"] = out["pos_ld"] = width * size * moves["row_step"]
    out["rows"] = moves["rows"]
    out["cols"] = moves["cols"]
    out["tensor"] = tensor
    out["scale_tensor"] = -1
    out["item"] = item
    out["out"] = size

    source_dtype = np.array([plan.parameters[int(index)].dtype for index in indices])[inverse]
    out["op"] = np.select(
        [target_dtype == source_dtype, target_dtype == "bfloat16", target_dtype == "float32"],
        [OP.COPY_CHECKED, OP.FP32_TO_BF16, OP.BF16_TO_FP32],
        OP.QUANTIZE_FP8,
    )
    if quantization is not None:
        _quantize(quantization, moves, form, tensor, codes, out)
    return out


def _quantize(
    quantization: Quantization,
    moves: np.ndarray,
    form: BucketForm,
    tensor: np.ndarray,
    chosen: np.ndarray,
    out: np.ndarray,
) -> None:
    """Sets the op, the rule, the block size and the location of the scales in the records in `out` that quantize.

    `tensor`: index in `form.tensors` of each move's target tensor, [moves]. `chosen`: True for moves that write
    quantized values (codes), bool [moves]."""
    high, wide = quantization.block
    scales = tensor[chosen] + 1  # the tensor of scales follows that of the codes
    width = form.width[scales]
    size = form.item[scales]
    offset = (moves["row"][chosen] // high * width + moves["col"][chosen] // wide) * size
    out["op"][chosen] = OP[quantization.operation]
    out["rule"][chosen] = RULE[quantization.rule.upper()]
    out["block_rows"][chosen] = high
    out["block_cols"][chosen] = wide
    out["scale_tensor"][chosen] = scales
    out["scale"][chosen] = form.offset[scales] + offset
    out["scale_pos"][chosen] = offset
    out["scale_ld"][chosen] = out["scale_pos_ld"][chosen] = width * size


def compact(pieces: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns copies of the records with new destinations, which follow each other in a contiguous buffer (filled by
    `Packer.pack_run`), and the buffer's size in bytes.

    The scales of a piece follow its values. Both start at multiples of 16 bytes, the widest access of the kernels."""
    out = pieces.copy()
    values, scales = _compact_bytes(pieces)
    ends = np.cumsum(values + scales)
    out["dst"] = ends - values - scales
    out["dst_ld"] = _row_bytes(pieces)
    out["scale"] = ends - scales
    out["scale_ld"] = _scale_row_bytes(pieces)
    return out, int(ends[-1]) if len(ends) else 0


@dataclass(frozen=True, slots=True)
class Portion:
    """Part of the contiguous buffer that `compact` lays out for a rank's pieces of a bucket. One kernel launch packs a
    portion into smaller, temporary memory, from which it is copied to the buffer."""

    pieces: np.ndarray
    """Records that write the portion into the temporary memory, starting at byte 0, [pieces] of `PIECE`."""
    size: int
    """Size in bytes of the temporary memory that the portion needs."""
    copies: tuple[tuple[int, int, int], ...]
    """Copies from the portion's temporary memory to the buffer: (first byte in the memory, first byte in the buffer,
    number of bytes)."""


def portions(pieces: np.ndarray, limit: int) -> Iterator[Portion]:
    """Divides the buffer that `compact(pieces)` lays out, and yields its portions, of at most `limit` bytes each.

    A portion contains consecutive whole pieces, or some rows of a piece that is larger than `limit`. It exceeds `limit`
    only if a single row of quantization blocks does."""
    packed, _ = compact(pieces)
    nbytes = run_bytes(pieces)
    ends = np.cumsum(nbytes)
    first = 0
    while first < len(packed):
        if nbytes[first] > limit:
            yield from _row_portions(packed[first : first + 1], limit)
            first += 1
            continue
        base = ends[first] - nbytes[first]
        stop = int(np.searchsorted(ends, base + limit, side="right"))
        part = packed[first:stop].copy()
        size = int(ends[stop - 1] - base)
        part["dst"] -= np.uint64(base)
        part["scale"] -= np.uint64(base)
        yield Portion(part, size, ((0, int(base), size),))
        first = stop


def _row_portions(piece: np.ndarray, limit: int) -> Iterator[Portion]:
    """Yields portions of the rows of one piece (a record array of length 1, as laid out by `compact`), each of at most
    `limit` bytes. Together they contain all rows."""
    width = _row_bytes(piece)[0]
    scale_width = _scale_row_bytes(piece)[0] if piece["scale_tensor"][0] >= 0 else 0
    high = max(1, int(piece["block_rows"][0]))
    rows = max(1, (limit - 32) // int(high * width + scale_width)) * high  # values and scales: up to 16 bytes padding
    for row in range(0, int(piece["rows"][0]), rows):
        part = piece.copy()
        part["rows"] = min(rows, int(piece["rows"][0]) - row)
        part["src"] += (row * piece["src_ld"]).astype(np.uint64)
        part["pos"] += (row * piece["pos_ld"]).astype(np.uint64)
        part["scale_pos"] += (row // high * piece["scale_pos_ld"]).astype(np.uint64)
        (values,), (scales,) = _compact_bytes(part)
        part["dst"] = 0
        part["scale"] = values
        copies = [(0, int(piece["dst"][0] + np.uint64(row * width)), int(part["rows"][0] * width))]
        if scales:
            blocks = -(-int(part["rows"][0]) // high)
            scale_start = int(piece["scale"][0] + np.uint64(row // high * scale_width))
            copies.append((int(values), scale_start, int(blocks * scale_width)))
        yield Portion(part, int(values + scales), tuple(copies))


def run_bytes(pieces: np.ndarray) -> np.ndarray:
    """Returns the number of bytes, including padding, that each piece occupies in the buffer that `compact` lays out,
    [pieces]."""
    values, scales = _compact_bytes(pieces)
    return values + scales


def _compact_bytes(pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of bytes, including padding, of each piece's values and of its scales in the buffer that
    `compact` lays out, [pieces] each."""
    values = pieces["rows"] * _row_bytes(pieces)
    scales = _scale_rows(pieces) * _scale_row_bytes(pieces)
    return -(-values // 16) * 16, -(-scales // 16) * 16


def spread(pieces: np.ndarray, run: torch.Tensor) -> np.ndarray:
    """Returns records that copy every piece from `run`, uint8 [bytes], to its destination in `pieces`. `run` must have
    been written with the records that `compact(pieces)` returns."""
    packed, _ = compact(pieces)
    out = []
    for dst, ld, rows, row_bytes in (
        ("dst", "dst_ld", pieces["rows"], _row_bytes(pieces)),
        ("scale", "scale_ld", _scale_rows(pieces), _scale_row_bytes(pieces)),
    ):
        copies = np.zeros(len(pieces), dtype=PIECE)
        copies["src"] = run.data_ptr() + packed[dst]
        copies["src_ld"] = row_bytes
        copies["dst"] = pieces[dst]
        copies["dst_ld"] = pieces[ld]
        copies["pos_ld"] = row_bytes
        copies["rows"] = rows
        copies["cols"] = row_bytes
        copies["src_step"] = copies["item"] = copies["out"] = 1
        copies["op"] = OP.COPY
        copies["scale_tensor"] = -1
        out.append(copies[rows > 0])
    return np.concatenate(out)


def _row_bytes(pieces: np.ndarray) -> np.ndarray:
    return written_cols(pieces) * pieces["out"]


def _scale_rows(pieces: np.ndarray) -> np.ndarray:
    return np.where(pieces["scale_tensor"] >= 0, -(-pieces["rows"] // np.maximum(pieces["block_rows"], 1)), 0)


def _scale_row_bytes(pieces: np.ndarray) -> np.ndarray:
    return -(-pieces["cols"] // np.maximum(pieces["block_cols"], 1)) * scale_bytes(pieces)


def _source(plan: Plan, index: int, parameters: Mapping[str, torch.Tensor] | None) -> tuple[int, int, int]:
    """Returns the address, elements per row and bytes per element of the plan's parameter `index`; the address is 0 if
    `parameters` is None.

    Raises SlimxError if the rank has no such parameter, or if the parameter's dtype, shape or layout differs from the
    plan's."""
    planned = plan.parameters[index]
    if parameters is None:
        return 0, matrix(planned.shape)[1], ITEMSIZE[planned.dtype]
    parameter = parameters.get(planned.name)
    if parameter is None:
        raise SlimxError(
            f"the plan reads {planned.name}, which this rank lacks; compile a plan for this rank's parallel sizes",
            code="pack.no_parameter",
            about=planned.name,
        )
    dtype = str(parameter.dtype).removeprefix("torch.")
    shape = tuple(parameter.shape)
    if (dtype, shape) != (planned.dtype, planned.shape) or not parameter.is_contiguous():
        contiguous = "" if parameter.is_contiguous() else ", not contiguous"
        raise SlimxError(
            f"parameter {planned.name} is {dtype} {list(shape)}{contiguous}, but the plan was compiled for contiguous "
            f"{planned.dtype} {list(planned.shape)}; compile the plan again for this model",
            code="pack.parameter",
            about=planned.name,
        )
    return parameter.data_ptr(), matrix(planned.shape)[1], parameter.element_size()
