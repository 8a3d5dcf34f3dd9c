"""Conversions to and from blocks of fp8, against the rules in plain torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.convert import run, sources
from slimx.errors import SlimxError
from slimx.reshard import reference
from slimx.reshard.kernel import RULE
from tests.checkpoint_stand import DEEPSEEK_V3, same, tensors_of, write_checkpoint
from tests.unit.convert_stand import LAYOUT, WIDE, go

BLOCK = 16


def in_fp8(deepseek: Path, directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint with some matrices in blocks, and what it says in bf16, by the reference."""
    shutil.copytree(deepseek, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
    (directory / "config.json").write_text(json.dumps(config))
    stored, wanted = {}, {}
    for name, value in tensors_of(deepseek).items():
        stored[name] = wanted[name] = value
        if "_proj" in name:
            codes, scales = reference.quantise(value, RULE.IEEE, (BLOCK, BLOCK))
            stored[name], stored[name + "_scale_inv"] = codes.view(torch.float8_e4m3fn), scales
            wanted[name] = reference.dequantise(codes, scales, (BLOCK, BLOCK), torch.bfloat16)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, wanted


@pytest.mark.parametrize("layout", ["", LAYOUT])
def test_fp8_sources_are_read_as_bf16(deepseek, tmp_path, layout):
    """With rows and columns cut off the edges of blocks, too."""
    source, wanted = in_fp8(deepseek, tmp_path / "fp8")
    megatron = go(run.hf_to_megatron(source, layout=layout), tmp_path / "megatron")
    back = go(run.megatron_to_hf(megatron, source), tmp_path / "hf")
    assert same(tensors_of(back), wanted) == []
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", ["ieee", "te", "ue8m0"])
def test_tensors_are_quantised_by_the_rule_and_the_others_left_alone(tmp_path, monkeypatch, rule, dtype):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 136 * 4 * 128)  # several blocks of rows per tensor
    source = write_checkpoint(tmp_path / "source", WIDE, dtype)
    found = tensors_of(go(run.hf_to_fp8(source, rule=rule), tmp_path / "fp8"))
    wanted = {}
    for name, value in tensors_of(source).items():
        wanted[name] = value
        if "_proj" in name:
            codes, scales = reference.quantise(value, RULE[rule.upper()], (128, 128))
            wanted[name], wanted[name + "_scale_inv"] = codes.view(torch.float8_e4m3fn), scales
    assert same(found, wanted) == []
    described = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert described["weight_block_size"] == [128, 128] and described["quant_method"] == "fp8"
    assert set(described["modules_to_not_convert"]) >= {"lm_head", "model.layers.0.mlp.gate"}
    assert described.get("scale_fmt") == ("ue8m0" if rule == "ue8m0" else None)


def test_what_cannot_be_quantised_is_refused_before_anything_is_written(qwen, tmp_path):
    with pytest.raises(SlimxError, match=r"q_proj.weight has 64 rows, no whole blocks of 128"):
        run.hf_to_fp8(qwen)
    source = write_checkpoint(tmp_path / "source", WIDE, torch.float32)
    with pytest.raises(SlimxError, match="rule triton"):
        run.hf_to_fp8(source, rule="triton")


def test_a_value_that_is_not_finite_is_named_and_nothing_is_left(tmp_path):
    source = write_checkpoint(tmp_path / "source", WIDE)
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"][3, 5] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SlimxError, match=r"experts\.1\.up_proj\.weight holds a value that is infinite"):
        go(run.hf_to_fp8(source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
