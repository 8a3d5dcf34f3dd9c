"""Models with vision towers, delta nets or stacked experts in fp8: conversion, and the parameters of engines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from slimx.config.load import load_config
from slimx.extras.convert import run
from slimx.extras.convert.work import convert
from slimx.layout.ranks import Sizes
from slimx.models.families import read_model
from slimx.models.files.index import read_object
from slimx.reshard.kernels.record import RULE
from slimx.reshard.plan.publication import publication_plan
from tests import reshard_reference as reference
from tests.checkpoint_stand import same, tensors_of, write_checkpoint
from tests.extras.vision.vision_stand import run as seeing
from tests.function_call import call_with_sglang
from tests.integration.engine_families import MODELS
from tests.unit.adapters.sglang_ranks import built, delta_net_model, join, pretend_hopper
from tests.unit.adapters.test_fp8_engines import ROOT, forms, forms_of, plan_of, sent_to

WIDE = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 256, "num_hidden_layers": 2}
BLOCK = (128, 128)
OFTEN = {"qwen3_vl_moe", "qwen3_5_moe_published"}
FAMILIES = [
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen2_5_vl",
    "glm4v_moe",
    "qwen3_5_published",
    "qwen3_5_moe_published",
    "qwen3_next",
]


def wide(name: str) -> dict[str, Any]:
    """Returns config.json of the model `name` with matrices of whole blocks."""
    hf: dict[str, Any] = json.loads(json.dumps(MODELS[name]))
    text = hf.get("text_config", hf)
    text.update(WIDE)
    for kind in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if kind in text:
            text[kind] = 128
    if "linear_key_head_dim" in text:
        text.update(linear_key_head_dim=128, linear_value_head_dim=128, num_hidden_layers=4)
    if "vision_config" in hf:
        hf["vision_config"]["out_hidden_size"] = WIDE["hidden_size"]
    return hf


def separated(tensors: dict[str, torch.Tensor], *, transposed: bool) -> dict[str, torch.Tensor]:
    """Returns the tensors with stacks of experts as one matrix for each projection of an expert."""
    out = {}
    for name, value in tensors.items():
        module, _, projection = name.rpartition(".")
        if not module.endswith(".experts") or name.startswith("mtp."):
            out[name] = value
            continue
        for index, expert in enumerate(value.transpose(1, 2) if transposed else value):
            gates = projection == "gate_up_proj"
            kinds = ("gate_proj", "up_proj") if gates else (projection,)
            for kind, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True):
                out[f"{module}.{index}.{kind}.weight"] = matrix.contiguous()
    return out


QUANTIZED = re.compile(r"model\.(language_model\.)?layers\..+\.(.+_proj|in_proj_qkv|in_proj_z|in_proj_qkvz)\.weight")


@pytest.mark.parametrize("name", FAMILIES)
def test_only_matrices_of_linear_layers_are_quantized(tmp_path: Path, name: str) -> None:
    source = write_checkpoint(tmp_path / "source", wide(name))
    convert(run.hf_to_fp8(source), tmp_path / "fp8", threads=1, verify=True)
    expected = {}
    for tensor, value in separated(tensors_of(source), transposed=name == "qwen3_vl_moe").items():
        expected[tensor] = value
        if QUANTIZED.fullmatch(tensor):
            codes, scales = reference.quantize(value, RULE.IEEE, BLOCK)
            expected[tensor], expected[tensor + "_scale_inv"] = codes.view(torch.float8_e4m3fn), scales
    assert same(tensors_of(tmp_path / "fp8"), expected) == []
    plain = read_object(tmp_path / "fp8" / "config.json")["quantization_config"]["modules_to_not_convert"]
    assert any(module.endswith("visual.patch_embed.proj") for module in plain) == ("vision_config" in wide(name))


def loaded(path: str) -> dict[str, list[float]]:
    """Returns the sum and the sum of squares of each parameter of SGLang's model after it has loaded the weights of
    `path`."""
    from safetensors.torch import load_file

    pretend_hopper()
    model = built(join(path), "cpu")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter.data.view(torch.uint8) if parameter.itemsize == 1 else parameter.data)
    weights = {name: value for file in Path(path).glob("*.safetensors") for name, value in load_file(file).items()}
    model.load_weights(iter(weights.items()))
    out = {}
    for name, parameter in model.named_parameters():
        values = parameter.data.double()
        out[name] = [float(values.sum()), float(values.square().sum())]
    return out


def test_sglang_loads_the_converted_experts(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", wide("qwen3_vl_moe"))
    convert(run.hf_to_fp8(source), tmp_path / "fp8", threads=1, verify=False)
    served = call_with_sglang(loaded, str(tmp_path / "fp8"))
    tensors = tensors_of(tmp_path / "fp8")
    layer = "model.language_model.layers.1.mlp.experts."
    for parameter, kinds in (("w13_weight", ("gate_proj", "up_proj")), ("w2_weight", ("down_proj",))):
        for suffix in ("", "_scale_inv"):
            parts = [
                value.double()
                for name, value in tensors.items()
                if name.startswith(layer) and name.endswith(tuple(f"{kind}.weight{suffix}" for kind in kinds))
            ]
            expected = [float(sum(p.sum() for p in parts)), float(sum(p.square().sum() for p in parts))]
            assert served[f"model.layers.1.mlp.experts.{parameter}{suffix}"] == pytest.approx(expected, rel=1e-9)


def delta_net_forms(path: str, rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of `forms_of` for a model with gated delta nets."""
    return forms(delta_net_model(path, rank, world, **arguments))


@pytest.mark.parametrize(
    "name",
    [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow("one family is like another"))
        for name in FAMILIES
    ],
)
def test_publications_have_the_forms_of_sglangs_parameters(tmp_path: Path, name: str) -> None:
    convert(run.hf_to_fp8(write_checkpoint(tmp_path / "source", wide(name))), tmp_path / "fp8", threads=1, verify=False)
    config = seeing(tmp_path, publish={"quantize": "te"})
    published = publication_plan(config, read_model(tmp_path / "source"), Sizes(), "cuda")
    assert published is not None and published.encoding == "local"
    built = call_with_sglang(
        delta_net_forms if name.startswith(("qwen3_5", "qwen3_next")) else forms_of, str(tmp_path / "fp8"), 0, 1, {}
    )
    assert built["uncovered"] == {"hf": {}, "local": {}}
    assert any(form.startswith("float8_e4m3fn") for form in built["hf"].values())
    assert sent_to(published, 0) == built["local"]
    config = seeing(tmp_path, publish={"quantize": "te", "encoding": "hf"})
    published = publication_plan(config, read_model(tmp_path / "source"), Sizes(), "cuda")
    assert published is not None and sent_to(published, 0) == built["hf"]


def test_a_shipped_configuration_publishes_experts_in_fp8(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "moe" / "qwen3-vl-235b-a22b.yaml", ["publish.quantize=te"])
    (group,) = config.served.policy
    _, published = plan_of(config, group, tmp_path / "model")
    arguments = {"ep_size": group.expert, "dp_size": group.dp_attention, "enable_dp_attention": group.dp_attention > 1}
    rank = group.tensor - 1
    forms = call_with_sglang(forms_of, str(tmp_path / "model"), rank, group.tensor, arguments)
    assert sent_to(published, rank) == forms["local"]
    assert forms["local"]["model.layers.1.mlp.experts.w13_weight"].startswith("float8_e4m3fn")
