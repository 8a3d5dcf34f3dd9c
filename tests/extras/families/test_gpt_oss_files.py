"""Files of gpt-oss: experts in MXFP4, read as transformers reads them, and conversions there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slimx.errors import SlimxError
from slimx.extras.convert import run
from slimx.extras.convert.work import convert
from slimx.extras.low_precision import mxfp4
from slimx.layout.megatron import MegatronLayout
from slimx.layout.ranks import Sizes
from slimx.models.families import read_model
from slimx.models.files.reader import CheckpointReader
from slimx.models.files.writer import finish_directory
from tests.extras.families.gpt_oss_stand import HF, NUMBERED, TABLE, sources
from tests.unit.layout.layout_stand import Tensors


def packed(tensors: Tensors) -> Tensors:
    """Returns the same checkpoint with random codes in the place of its experts' matrices."""
    random, out = torch.Generator().manual_seed(0), {}
    for name, tensor in tensors.items():
        if name not in TABLE.transposed():
            out[name] = tensor
            continue
        count, rows, cols = tensor.shape
        out[name + "_blocks"] = torch.randint(256, (count, cols, rows // 32, 16), dtype=torch.uint8, generator=random)
        out[name + "_scales"] = torch.randint(110, 140, (count, cols, rows // 32), dtype=torch.uint8, generator=random)
    return out


def test_mxfp4_is_dequantized_as_in_transformers_and_the_standard():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)
    scales = torch.arange(116, 132, dtype=torch.uint8).view(1, 2, 8)
    ours = mxfp4.dequantize(blocks, scales)
    assert torch.equal(ours.transpose(1, 2), convert_moe_packed_tensors(blocks, scales))
    assert ours[0, 0, :4].tolist() == [0.0, 0.0, 0.5 * 2.0**-11, 0.0]  # the low half first


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(data=2, expert=2)], ids=str)
def test_ranks_read_their_slices_of_an_mxfp4_checkpoint(tmp_path: Path, sizes):
    (tmp_path / "config.json").write_text(json.dumps({**HF, "quantization_config": {"quant_method": "mxfp4"}}))
    spec = read_model(tmp_path)
    plain = {name: torch.randn(shape).bfloat16() for name, shape in spec.table.checkpoint_shapes().items()}
    tensors = packed(plain)
    save_file(tensors, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    reader.check(spec.table)
    for name in spec.table.transposed():
        plain[name] = convert_moe_packed_tensors(tensors[name + "_blocks"], tensors[name + "_scales"])
    unpacked = sources(plain)
    for part in MegatronLayout(spec.table, sizes).parts():
        for rect in part.rects:
            name = part.sources[rect.source]
            source = unpacked[name].reshape(len(unpacked[name]), -1)
            expected = source[rect.row :: rect.step][: rect.rows, rect.col : rect.col + rect.cols]
            assert torch.equal(reader.read(name, rect), expected), name
            assert reader.dtype(name) == torch.bfloat16


@pytest.mark.parametrize("suffix", ["_blocks", "_scales"])
def test_a_damaged_mxfp4_tensor_is_refused_by_name(tmp_path: Path, suffix):
    (tmp_path / "config.json").write_text(json.dumps(HF))
    tensors = packed({name: value.float() for name, value in NUMBERED.items()})
    name = f"model.layers.0.mlp.experts.down_proj{suffix}"
    for code, damaged in (("shape", tensors[name][:, :-1].contiguous()), ("dtype", tensors[name].view(torch.int8))):
        save_file(tensors | {name: damaged}, tmp_path / "model.safetensors")
        with pytest.raises(SlimxError) as error:
            CheckpointReader(tmp_path).check(TABLE)
        assert (error.value.code, error.value.about) == (f"checkpoint.{code}", name)


# Conversions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "MXFP4"])
def test_a_conversion_there_and_back_gives_every_bit_and_bf16_of_mxfp4(tmp_path: Path, quantized):
    source = tmp_path / "source"
    source.mkdir()
    hf = {**HF, **({"quantization_config": {"quant_method": "mxfp4"}} if quantized else {})}
    (source / "config.json").write_text(json.dumps(hf))
    expected = {name: torch.randn(shape).bfloat16() for name, shape in TABLE.checkpoint_shapes().items()}
    tensors = packed(expected) if quantized else expected
    save_file(tensors, source / "model.safetensors")
    if quantized:
        for name in TABLE.transposed():
            expected[name] = convert_moe_packed_tensors(tensors[name + "_blocks"], tensors[name + "_scales"])
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    convert(run.hf_to_megatron(source, layout="tensor=2,expert=2,expert_tensor=1"), megatron, threads=1, verify=True)
    convert(run.megatron_to_hf(megatron, source), back, threads=1, verify=True)
    found = {name: tensor for file in back.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_a_runs_export_does_not_call_itself_quantized(tmp_path: Path):
    source, out = tmp_path / "source", tmp_path / "out"
    for directory in (source, out):
        directory.mkdir()
    (source / "config.json").write_text(json.dumps({**HF, "quantization_config": {"quant_method": "mxfp4"}}))
    finish_directory(out, source, TABLE, [], weights=None)
    assert json.loads((out / "config.json").read_text()) == HF
