"""Checkpoints in block fp8: their blocks, and that a trainer does not start from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slimx.extras.low_precision.block_fp8 import FORMAT, block_of
from slimx.extras.low_precision.blocks import dequantize, quantize
from slimx.layout.table import Stored
from slimx.models.families import read_model
from slimx.models.files.reader import CheckpointReader
from slimx.reshard.kernels.record import RULE
from tests import reshard_reference as reference
from tests.checkpoint_stand import QWEN3_MOE
from tests.refusals import refused


def described(directory: Path, **changes: Any) -> Path:
    """Returns a directory with a config.json only."""
    (directory / "config.json").write_text(json.dumps(QWEN3_MOE | changes))
    return directory


@pytest.mark.parametrize("size", [None, [128], [128, 0], "128", [128, "x"]])
def test_blocks_of_no_size_are_refused_with_the_file(tmp_path: Path, size: Any):
    described(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": size})
    with refused("checkpoint.block_size", about=str(tmp_path / "config.json")):
        block_of(tmp_path)


def test_scales_of_fp8_are_refused_where_a_model_is_trained(tmp_path: Path):
    table = read_model(described(tmp_path)).table
    tensors = {name: torch.zeros(shape) for name, shape in table.checkpoint_shapes().items()}
    scales = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    save_file(tensors | {scales: torch.ones(1, 1)}, tmp_path / "model.safetensors")
    with refused("checkpoint.fp8", about=scales):
        CheckpointReader(tmp_path).check(table)


def test_a_stack_has_the_values_of_its_matrices():
    values = torch.randn(3, 100, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scales = map(torch.stack, zip(*(quantize(matrix, RULE.IEEE, (32, 64)) for matrix in values), strict=True))
    expected = [dequantize(*matrix, (32, 64)) for matrix in zip(codes, scales, strict=True)]
    assert torch.equal(dequantize(codes, scales, (32, 64)), torch.stack(expected))
    assert torch.equal(dequantize(codes[::2], scales[::2], (32, 64)), torch.stack(expected[::2]))
    assert dequantize(codes[:0], scales[:0], (32, 64)).shape == (0, 100, 200)


@pytest.mark.parametrize("rows", [slice(0, 100), slice(32, 96), slice(37, 38), slice(70, 100)])
@pytest.mark.parametrize("cols", [slice(0, 200), slice(64, 128), slice(5, 190)])
def test_a_slice_has_the_values_of_the_whole_wherever_it_cuts_blocks(tmp_path: Path, rows: slice, cols: slice):
    values = torch.randn(100, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scales = reference.quantize(values, RULE.IEEE, (32, 64))
    described(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 64]})
    save_file({"x": codes.view(torch.float8_e4m3fn), "x_scale_inv": scales}, tmp_path / "model.safetensors")
    found = FORMAT.read(CheckpointReader(tmp_path), Stored("x"), rows, cols)
    assert torch.equal(found, reference.dequantize(codes, scales, (32, 64), torch.bfloat16)[rows, cols])
