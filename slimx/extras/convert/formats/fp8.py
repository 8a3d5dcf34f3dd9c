"""Tensors of a Hugging Face directory in block fp8, and the config.json that declares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.extras.convert.compare import compare_quantized
from slimx.extras.convert.formats.safetensors import Tensor, Unit
from slimx.extras.convert.formats.served import plain_entries
from slimx.extras.convert.sources import Advance, Reading, Scratch, Shape, row_blocks
from slimx.extras.low_precision.block_fp8 import SCALE_SUFFIX, scales_shape
from slimx.json_types import Json
from slimx.layout.maps import Rect
from slimx.layout.number_formats import Quantization
from slimx.layout.table import Entry, Row
from slimx.models.families import ModelSpec
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.record import OP, PIECE, RULE, element_bytes


class Matrix(NamedTuple):
    """Tensor of the output that is quantized, and the rows of the source's tensor that provide its values."""

    name: str
    shape: Shape
    source: str
    """Name of the source's tensor, as in the weight table."""
    row: int
    """Row of the source's tensor that is the first of the matrix."""

    def read(self, source: Reading, rect: Rect) -> torch.Tensor:
        """Returns the elements `rect` of the matrix, [rect.rows, rect.cols], read from `source`."""
        return source.read(self.source, rect._replace(row=self.row + rect.row))


def quantized_matrices(spec: ModelSpec, block: tuple[int, int]) -> dict[str, list[Matrix]]:
    """Returns, for each source of the weight table that trainer and engines store in fp8, the matrices of the output
    that contain it: one or, for an expert in a stack, its projections, which are stored separately. `block`: rows and
    columns of a quantization block.

    Raises SlimxError for a tensor that engines could not use, because they concatenate it with other tensors and a
    block would span two of them."""
    separate = spec.family.separate_experts
    written = spec.table if separate is None else separate(spec.table)
    plain = {source for entry in plain_entries(spec, is_quantized) for source in entry.sources}
    matrices: dict[str, list[Matrix]] = {}
    for entry, target in zip(spec.table.entries(), written.entries(), strict=True):
        if not entry.row.quantized:
            continue
        joined = [matrix for matrix in _matrices(entry, target) if matrix.source not in plain]
        for matrix in joined:
            rows = matrix.shape[0]
            if len(joined) > 1 and rows % block[0]:
                raise SlimxError(
                    f"tensor {matrix.name} has {rows} rows, but block-wise FP8 requires a multiple of {block[0]} rows, "
                    f"because engines concatenate {matrix.name} with {joined[-1].name}; keep the model in bf16",
                    code="convert.blocks",
                    about=matrix.name,
                )
            matrices.setdefault(matrix.source, []).append(matrix)
    return matrices


def _matrices(entry: Entry, target: Entry) -> Iterator[Matrix]:
    """Yields the tensors of `target`, which are the rows of the tensors of `entry` in the same order."""
    sources = zip(entry.sources, entry.row.sources, strict=True)
    row = rows = 0
    for name, (_, shape) in zip(target.sources, target.row.sources, strict=True):
        if row == rows:
            source, (_, (rows, *_)) = next(sources)
            row = 0
        yield Matrix(name, shape, source, row)
        row += shape[0]


def is_quantized(row: Row) -> bool:
    """Returns True if fp8 checkpoints of the family store the tensors of `row` in fp8."""
    return row.quantized


def quantized(matrix: Matrix, quantization: Quantization) -> Unit:
    """Plans the output of a matrix in fp8: its e4m3 codes, followed by its scales."""
    name = matrix.name
    shape = matrix.shape
    block = quantization.block

    def parts(reading: Reading) -> Iterator[torch.Tensor]:
        scales = []
        for rect in row_blocks(shape, 4, multiple=block[0]):
            codes, part = _quantize(name, matrix.read(reading, rect).contiguous(), quantization, reading.scratch)
            scales.append(part.clone())
            yield codes
        yield torch.cat(scales)

    down, across = scales_shape(shape, block)

    def compare(source: Reading, written: Reading, advance: Advance) -> None:
        scales = written.read(name + SCALE_SUFFIX, Rect(0, 0, 0, down, across, 0, 0)).clone()
        compare_quantized(name, shape, block, partial(matrix.read, source), written, scales, advance)

    codes = Tensor(name, torch.float8_e4m3fn, shape)
    return Unit((codes, Tensor(name + SCALE_SUFFIX, torch.float32, (down, across))), parts, compare)


def _quantize(
    name: str, values: torch.Tensor, quantization: Quantization, scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `values` [rows, cols]. Returns codes, uint8 [rows, cols], and scales [block rows, block cols], both in
    the memory of `scratch`.

    bf16 and fp32 are quantized directly. fp16, which the kernels do not support, is first converted to fp32 without
    loss."""
    if values.dtype == torch.float16:
        values = values.float()
    item = element_bytes(name, values, torch.bfloat16, torch.float32)
    rows, cols = values.shape
    down, across = scales_shape((rows, cols), quantization.block)
    scale_offset = -(-rows * cols // 16) * 16
    bucket = scratch.tensor((scale_offset + down * across * 4,), torch.uint8)
    fields = {
        "src": values.data_ptr(),
        "item": item,
        "out": 1,
        "src_ld": cols * item,
        "src_step": item,
        "rows": rows,
        "cols": cols,
        "dst_ld": cols,
        "pos_ld": cols,
        "scale": scale_offset,
        "scale_ld": across * 4,
        "scale_pos_ld": across * 4,
        "tensor": 0,
        "scale_tensor": 1,
        "block_rows": quantization.block[0],
        "block_cols": quantization.block[1],
        "op": OP.QUANTIZE_FP8,
        "rule": RULE[quantization.rule.upper()],
    }
    piece = np.zeros(1, dtype=PIECE)
    for field, value in fields.items():
        piece[field] = value
    kernel.pack(piece, bucket, np.zeros(2, dtype=np.uint64), np.zeros(2, dtype=np.uint32), threads=1)
    return bucket[: rows * cols].view(rows, cols), bucket[scale_offset:].view(torch.float32).view(down, across)


def check_rule(rule: str, dtype: torch.dtype, name: str) -> None:
    """Raises SlimxError if the scale rule `rule` cannot quantize tensor `name` of `dtype` on this host."""
    if rule != "triton":
        return
    if dtype != torch.bfloat16:
        raise SlimxError(
            f"tensor {name} has dtype {dtype}, but --rule triton quantizes only bf16 tensors; set --rule to ieee, "
            "te or ue8m0",
            code="convert.rule",
            about=name,
        )
    kernel.triton_scales(kernel.TRITON_SCALES)  # raises an error on a host without the table


def with_quantization(hf: Json, quantization: Quantization, plain: Sequence[str]) -> Json:
    """Returns `hf`, the contents of config.json, with quantization settings for fp8 weights added, for SGLang and
    transformers. `plain`: names of the matrices that are not quantized."""
    config: Json = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(quantization.block),
        "modules_to_not_convert": [*dict.fromkeys(name.removesuffix(".weight") for name in plain)],
    }
    if quantization.rule == "ue8m0":
        config["scale_fmt"] = "ue8m0"
    return {**hf, "quantization_config": config}
