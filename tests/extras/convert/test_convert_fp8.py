"""Conversions to and from blocks of fp8, against the rules in plain torch."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from slimx.errors import SlimxError
from slimx.extras.convert import run, sources
from slimx.extras.convert.formats import fp8, torch_dist
from slimx.extras.convert.work import convert
from slimx.extras.low_precision import blocks
from slimx.models.families import read_model
from slimx.models.files.reader import CheckpointReader
from slimx.reshard.kernels.record import RULE
from tests import reshard_reference as reference
from tests.checkpoint_stand import DEEPSEEK_V3, same, tensors_of, write_checkpoint
from tests.extras.convert.convert_stand import LAYOUT, WIDE, change, go
from tests.refusals import refused

BLOCK = 16


def in_fp8(deepseek: Path, directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Writes the checkpoint with some matrices in fp8 blocks; returns it and its bf16 values by the reference."""
    shutil.copytree(deepseek, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
    (directory / "config.json").write_text(json.dumps(config))
    stored, expected = {}, {}
    for name, value in tensors_of(deepseek).items():
        stored[name] = expected[name] = value
        if "_proj" in name:
            codes, scales = reference.quantize(value, RULE.IEEE, (BLOCK, BLOCK))
            stored[name], stored[name + "_scale_inv"] = codes.view(torch.float8_e4m3fn), scales
            expected[name] = reference.dequantize(codes, scales, (BLOCK, BLOCK), torch.bfloat16)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, expected


@pytest.mark.parametrize("layout", ["", LAYOUT])
def test_fp8_sources_are_read_as_bf16(deepseek, tmp_path, layout):
    """With rows and columns cut off the edges of blocks, too."""
    source, expected = in_fp8(deepseek, tmp_path / "fp8")
    megatron = go(run.hf_to_megatron(source, layout=layout), tmp_path / "megatron")
    back = go(run.megatron_to_hf(megatron, source), tmp_path / "hf")
    assert same(tensors_of(back), expected) == []
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rule", ["ieee", "te", "ue8m0"])
def test_tensors_are_quantized_by_the_rule_and_the_others_left_alone(tmp_path, monkeypatch, rule, dtype):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 136 * 4 * 128)  # several blocks of rows per tensor
    source = write_checkpoint(tmp_path / "source", WIDE, dtype)
    found = tensors_of(go(run.hf_to_fp8(source, rule=rule), tmp_path / "fp8"))
    expected = {}
    for name, value in tensors_of(source).items():
        expected[name] = value
        if "_proj" in name:
            # fp16 is what fp32 of the same value is: it is exact there.
            exact = value.float() if dtype == torch.float16 else value
            codes, scales = reference.quantize(exact, RULE[rule.upper()], (128, 128))
            expected[name], expected[name + "_scale_inv"] = codes.view(torch.float8_e4m3fn), scales
    assert same(found, expected) == []
    described = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert described["weight_block_size"] == [128, 128] and described["quant_method"] == "fp8"
    assert set(described["modules_to_not_convert"]) >= {"lm_head", "model.layers.0.mlp.gate"}
    assert json.loads((tmp_path / "fp8/config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert described.get("scale_fmt") == ("ue8m0" if rule == "ue8m0" else None)


def test_an_unquantizable_model_is_refused_before_any_write(qwen, tmp_path):
    with refused("convert.blocks", about="model.layers.0.self_attn.q_proj.weight"):
        run.hf_to_fp8(qwen)
    source = write_checkpoint(tmp_path / "source", WIDE, torch.float32)
    with refused("convert.rule"):
        run.hf_to_fp8(source, rule="triton")


def test_a_value_that_is_not_finite_is_named_and_nothing_is_left(tmp_path):
    source = write_checkpoint(tmp_path / "source", WIDE)
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"][3, 5] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    with refused("checkpoint.finite", about="model.layers.0.mlp.experts.1.up_proj.weight"):
        go(run.hf_to_fp8(source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda values: values.view(torch.bfloat16), id="bits of another dtype"),
        pytest.param(lambda values: values.flip(0), id="another order"),
        pytest.param(lambda values: values * 1.25, id="another value"),
    ],
)
def test_verification_sees_values_that_are_not_the_sources(tmp_path, monkeypatch, broken):
    """Checksums cannot see such values: the bytes on the disk are those that were written."""
    source = write_checkpoint(tmp_path / "source", WIDE, torch.float16)
    quantize = fp8._quantize
    monkeypatch.setattr(fp8, "_quantize", lambda name, values, *how: quantize(name, broken(values), *how))
    convert(run.hf_to_fp8(source), tmp_path / "unseen", threads=1, verify=False)
    with pytest.raises(SlimxError) as error:
        go(run.hf_to_fp8(source), tmp_path / "out")
    assert (error.value.code, error.value.about) == ("convert.values", "model.layers.0.self_attn.q_proj.weight")
    assert not (tmp_path / "out").exists()


def test_verification_sees_wrong_values_in_a_megatron_directory(qwen, tmp_path, monkeypatch):
    make = torch_dist.Piece.make
    monkeypatch.setattr(torch_dist.Piece, "make", lambda piece, reading: make(piece, reading).flip(0).contiguous())
    with pytest.raises(SlimxError) as error:
        go(run.hf_to_megatron(qwen), tmp_path / "out")
    assert (error.value.code, error.value.about) == ("convert.values", "model.embed_tokens.weight")


def test_codes_of_fp8_blocks_are_not_taken_for_another_dtype():
    scales, half = torch.ones(1, 1), torch.zeros(16, 16, dtype=torch.float16)
    codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    with pytest.raises(SlimxError) as error:
        blocks.dequantize(codes, scales, (16, 16), torch.float16)
    assert (error.value.code, error.value.about) == ("kernel.dtype", "values of fp8 blocks")
    with pytest.raises(SlimxError) as error:
        blocks.dequantize(half, scales, (16, 16))
    assert (error.value.code, error.value.about) == ("kernel.dtype", "codes of fp8 blocks")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e5m2])
def test_a_dtype_that_would_be_misread_is_refused_by_every_reader(qwen, tmp_path, dtype):
    name = "model.layers.1.self_attn.k_proj.weight"
    source = shutil.copytree(qwen, tmp_path / "source")
    change(source, **{name: tensors_of(qwen)[name].to(dtype)})
    for read in (run.hf_to_megatron, run.hf_to_fp8, lambda path: CheckpointReader(path).check(read_model(path).table)):
        with pytest.raises(SlimxError) as error:
            read(source)
        assert (error.value.code, error.value.about) == ("checkpoint.dtype", name)


def test_fp8_that_is_no_matrix_with_scales_is_refused_by_name(deepseek, tmp_path):
    source, _ = in_fp8(deepseek, tmp_path / "source")
    file = source / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.input_layernorm.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    with pytest.raises(SlimxError) as error:
        run.hf_to_megatron(source)
    assert (error.value.code, error.value.about) == ("checkpoint.dtype", name)
    scales = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    save_file(tensors | {scales: tensors[scales].to(torch.float8_e5m2)}, file, metadata={"format": "pt"})
    with pytest.raises(SlimxError) as error:
        run.hf_to_megatron(source)
    assert (error.value.code, error.value.about) == ("checkpoint.dtype", scales)


def test_a_dtype_that_metadata_and_file_do_not_agree_on_is_refused(qwen, tmp_path):
    """The two dtypes both have two bytes per element."""
    megatron = go(run.hf_to_megatron(qwen), tmp_path / "megatron")
    metadata = FileSystemReader(megatron / "release").read_metadata()
    key = "decoder.final_layernorm.weight"
    metadata.state_dict_metadata[key].properties.dtype = torch.float16
    (megatron / "release/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SlimxError) as error:
        go(run.megatron_to_hf(megatron, qwen), tmp_path / "out")
    assert (error.value.code, error.value.about) == ("megatron.dtype", "__0_0.distcp")
    metadata.state_dict_metadata[key].properties.dtype = torch.float64
    (megatron / "release/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SlimxError) as error:
        run.megatron_to_hf(megatron, qwen)
    assert (error.value.code, error.value.about) == ("megatron.dtype", key)
