"""Tensors of a Hugging Face directory in block fp8, and the config.json that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.extras.convert.compare import compare_quantised
from slimx.extras.convert.formats.safetensors import Tensor, Unit
from slimx.extras.convert.sources import Advance, Reading, Scratch, Shape, row_blocks
from slimx.extras.low_precision.block_fp8 import SCALE_SUFFIX, scales_shape
from slimx.layout.maps import Rect
from slimx.layout.number_formats import Quantisation
from slimx.layout.table import Table
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.record import OP, PIECE, RULE, element_bytes


def quantised_names(table: Table, block: tuple[int, int]) -> frozenset[str]:
    """Checkpoint tensors that the family's fp8 checkpoints hold in fp8.

    Raises SlimxError where engines could not use it: they fuse the sources of one row, block by block."""
    names: set[str] = set()
    for entry in table.entries():
        if not entry.row.quantised:
            continue
        shapes = [shape for _, shape in entry.row.sources]
        for name, shape in zip(entry.sources, shapes, strict=True):
            if len(shapes) > 1 and shape[0] % block[0]:
                raise SlimxError(
                    f"tensor {name} has {shape[0]} rows, no whole blocks of {block[0]}: engines put it in one "
                    f"tensor with {entry.sources[len(shapes) - 1]}; this model cannot be served in block fp8",
                    code="convert.blocks",
                    about=name,
                )
            names.add(name)
    return frozenset(names)


def quantised(name: str, shape: Shape, quantisation: Quantisation) -> Unit:
    """A matrix as e4m3 codes, and its scales behind it."""
    block = quantisation.block

    def parts(reading: Reading) -> Iterator[torch.Tensor]:
        scales = []
        for rect in row_blocks(shape, 4, multiple=block[0]):
            codes, own = _quantise(name, reading.read(name, rect).contiguous(), quantisation, reading.scratch)
            scales.append(own.clone())
            yield codes
        yield torch.cat(scales)

    down, across = scales_shape(shape, block)

    def compare(source: Reading, written: Reading, advance: Advance) -> None:
        scales = written.read(name + SCALE_SUFFIX, Rect(0, 0, 0, down, across, 0, 0)).clone()
        compare_quantised(name, shape, block, source, written, scales, advance)

    codes = Tensor(name, torch.float8_e4m3fn, shape)
    return Unit((codes, Tensor(name + SCALE_SUFFIX, torch.float32, (down, across))), parts, compare)


def _quantise(
    name: str, values: torch.Tensor, quantisation: Quantisation, scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, uint8 [rows, cols], and scales [block rows, block cols] of `values` [rows, cols], both in `scratch`.

    bf16 and fp32 are quantised as they are; fp16, which the kernels do not know, as the fp32 of the same value."""
    if values.dtype == torch.float16:
        values = values.float()
    item = element_bytes(name, values, torch.bfloat16, torch.float32)
    (rows, cols), (high, wide) = values.shape, quantisation.block
    down, across = scales_shape((rows, cols), quantisation.block)
    at = -(-rows * cols // 16) * 16
    bucket = scratch.tensor((at + down * across * 4,), torch.uint8)
    piece = np.zeros(1, dtype=PIECE)
    piece["src"], piece["item"], piece["out"] = values.data_ptr(), item, 1
    piece["src_ld"], piece["src_step"] = cols * item, item
    piece["rows"], piece["cols"], piece["dst_ld"], piece["pos_ld"] = rows, cols, cols, cols
    piece["scale"], piece["scale_ld"], piece["scale_pos_ld"] = at, across * 4, across * 4
    piece["tensor"], piece["scale_tensor"] = 0, 1
    piece["block_rows"], piece["block_cols"] = high, wide
    piece["op"], piece["rule"] = OP.QUANTISE_FP8, RULE[quantisation.rule.upper()]
    kernel.pack(piece, bucket, np.zeros(2, dtype=np.uint64), np.zeros(2, dtype=np.uint32), threads=1)
    return bucket[: rows * cols].view(rows, cols), bucket[at:].view(torch.float32).view(down, across)


def check_rule(rule: str, dtype: torch.dtype, name: str) -> None:
    """Raises SlimxError where `rule` cannot quantise tensor `name` of `dtype` here."""
    if rule != "triton":
        return
    if dtype != torch.bfloat16:
        raise SlimxError(
            f"tensor {name} is {dtype}: the rule triton quantises bf16 only; choose another rule",
            code="convert.rule",
            about=name,
        )
    kernel.triton_scales(kernel.TRITON_SCALES)  # refuses a machine that lacks the table


def with_quantisation(hf: Mapping[str, Any], quantisation: Quantisation, plain: Sequence[str]) -> dict[str, Any]:
    """The config.json `hf` of a model in fp8 but for the matrices `plain`, as SGLang and transformers read it."""
    described: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(quantisation.block),
        "modules_to_not_convert": [name.removesuffix(".weight") for name in plain],
    }
    if quantisation.rule == "ue8m0":
        described["scale_fmt"] = "ue8m0"
    return {**hf, "quantization_config": described}
