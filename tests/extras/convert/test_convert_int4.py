"""Conversions to INT4 and back: compressed-tensors reads the codes, and a second conversion changes none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file

from slimx.errors import SlimxError
from slimx.extras.convert import run, sources
from slimx.extras.convert.formats import int4
from slimx.extras.low_precision import int4_kernel as kernel
from slimx.extras.low_precision.int4 import FORMAT, GROUP, SHAPE
from tests.checkpoint_stand import DEEPSEEK_V3, same, tensors_of, write_checkpoint
from tests.extras.convert.convert_stand import LAYOUT, QWEN3, WIDE, dtypes_of, go
from tests.extras.families.gpt_oss_stand import HF as GPT_OSS
from tests.refusals import refused

GROUPED = WIDE | {"hidden_size": 160, "moe_intermediate_size": 96, "num_experts": 4}
SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP),
)


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def rounded(source: Path) -> dict[str, torch.Tensor]:
    """The source's tensors, its experts rounded by the kernel that trainers round by."""
    out = tensors_of(source)
    for name, value in out.items():
        if is_expert(name):
            out[name] = value.bfloat16()
            kernel.round_(out[name])
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_experts_are_stored_as_compressed_tensors_stores_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 40 * 4 * 160)  # several blocks of rows per tensor
    source = write_checkpoint(tmp_path / "source", GROUPED, dtype)
    out = go(run.hf_to_int4(source), tmp_path / "int4")
    found, expected = tensors_of(out), rounded(source)
    for name in filter(is_expert, expected):
        stored = {f"weight{part}": found.pop(name + part) for part in ("_packed", "_scale", "_shape")}
        assert stored["weight_shape"].tolist() == list(expected[name].shape)
        decompressed = PackedQuantizationCompressor.decompress(stored, SCHEME)["weight"]
        assert torch.equal(decompressed, expected[name])
    assert same(found, {name: value for name, value in expected.items() if not is_expert(name)}) == []
    assert {dtypes_of(out)[name] for name in dtypes_of(out) if name.endswith(SHAPE)} == {"I64"}
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert FORMAT.other_scheme(described) is None
    theirs = QuantizationConfig(**described)
    assert theirs.config_groups["group_0"].weights.group_size == GROUP
    assert set(theirs.ignore) >= {"lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"}
    assert not any(is_expert(name + ".") for name in theirs.ignore)


@pytest.mark.parametrize("layout", ["", LAYOUT])
def test_rounded_weights_round_to_themselves_after_conversion(tmp_path: Path, layout: str) -> None:
    source = write_checkpoint(tmp_path / "source", GROUPED | {"num_hidden_layers": 2})
    packed = go(run.hf_to_int4(source), tmp_path / "int4")
    megatron = go(run.hf_to_megatron(packed, layout=layout), tmp_path / "megatron")
    back = go(run.megatron_to_hf(megatron, packed), tmp_path / "hf")
    assert same(tensors_of(back), rounded(source)) == []
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    again = go(run.hf_to_int4(back), tmp_path / "again")
    assert same(tensors_of(again), tensors_of(packed)) == []


def test_shared_experts_and_dense_layers_stay_as_they_are(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", DEEPSEEK_V3 | {"hidden_size": 64, "moe_intermediate_size": 32})
    found = tensors_of(go(run.hf_to_int4(source), tmp_path / "int4"))
    packed = {name.removesuffix("_packed") for name in found if name.endswith("_packed")}
    assert packed == {name for name in tensors_of(source) if is_expert(name)}
    assert any("shared_experts" in name for name in found)


def test_a_model_without_an_int4_format_is_refused_before_any_write(tmp_path: Path) -> None:
    with refused("convert.groups", about="model.layers.0.mlp.experts.0.gate_proj.weight"):
        run.hf_to_int4(write_checkpoint(tmp_path / "odd", WIDE))
    with refused("convert.int4"):
        run.hf_to_int4(write_checkpoint(tmp_path / "dense", QWEN3))
    with refused("convert.int4"):
        run.hf_to_int4(write_checkpoint(tmp_path / "stacked", GPT_OSS))


def test_a_value_that_is_not_finite_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", GROUPED)
    (file,) = source.glob("*.safetensors")
    tensors, name = load_file(file), "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[name][3, 5] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    with refused("checkpoint.finite", about=name):
        go(run.hf_to_int4(source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("factor", [1.25, -1.0])
def test_verification_sees_values_that_are_not_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    source = write_checkpoint(tmp_path / "source", GROUPED)
    quantize = kernel.quantize
    monkeypatch.setattr(int4.kernel, "quantize", lambda values, **how: quantize(values * factor, **how))
    with pytest.raises(SlimxError) as error:
        go(run.hf_to_int4(source), tmp_path / "out")
    assert error.value.code == "convert.values"
    assert is_expert(error.value.about)
    assert not (tmp_path / "out").exists()
