"""Megatron checkpoints of vision-language models under the keys of Megatron-Bridge. A trainer loads them in
tests/integration/test_families.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slimx.extras.convert import run
from slimx.extras.convert.formats.torch_dist_reader import read_whole
from slimx.extras.convert.run import Layers
from slimx.extras.convert.work import convert
from slimx.models.files.safe_pickle import read_metadata
from tests.checkpoint_stand import same, tensors_of, write_checkpoint
from tests.integration.engine_families import MODELS
from tests.refusals import refused

TOWERS = {
    "qwen3_vl_moe": ("vision_model",),
    "qwen3_5_moe_published": ("vision_model",),
    "qwen2_5_vl": ("visual",),
    "glm4v_moe": ("visual",),
    "kimi_k25": ("vision_tower", "mm_projector"),
}
"""Model -> first components of the keys of its tower."""


def converted(directory: Path, name: str, layers: Layers = "auto") -> tuple[dict[str, torch.Tensor], Path]:
    """Converts a checkpoint of the model `name`. Returns the stored tensors by key, and the output directory."""
    source = write_checkpoint(directory / "source", MODELS[name])
    out = directory / "megatron"
    convert(run.hf_to_megatron(source, layers=layers), out, threads=1, verify=True)
    metadata = read_metadata(out / "release" / ".metadata")
    return {key: read_whole(out / "release", key, metadata) for key in metadata.state_dict_metadata}, out


@pytest.mark.parametrize("layers", ["numbered", "stacked"])
def test_the_tower_of_qwen3_vl_consists_of_megatrons_layers(tmp_path: Path, layers: Layers) -> None:
    stored, out = converted(tmp_path, "qwen3_vl", layers)
    source = tensors_of(tmp_path / "source")
    vision = MODELS["qwen3_vl"]["vision_config"]
    for index in range(vision["depth"]):
        for kind in ("weight", "bias"):
            key = f"self_attention.linear_qkv.{kind}"
            found = (
                stored[f"vision_model.decoder.layers.{index}.{key}"]
                if layers == "numbered"
                else stored[f"vision_model.decoder.layers.{key}"][index]
            )
            by_kind = source[f"model.visual.blocks.{index}.attn.qkv.{kind}"].unflatten(0, (3, vision["num_heads"], -1))
            assert torch.equal(found, by_kind.transpose(0, 1).flatten(0, 2))
    assert torch.equal(stored["vision_model.merger.patch_norm.weight"], source["model.visual.merger.norm.weight"])
    assert all(key.startswith(("vision_model.", "language_model.")) for key in stored)
    convert(run.megatron_to_hf(out, tmp_path / "source"), tmp_path / "back", threads=1, verify=True)
    assert same(tensors_of(tmp_path / "back"), source) == []


@pytest.mark.parametrize("name", list(TOWERS))
def test_other_checkpoints_come_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    stored, out = converted(tmp_path, name)
    assert {key.partition(".")[0] for key in stored} == {"language_model", *TOWERS[name]}
    convert(run.megatron_to_hf(out, tmp_path / "source"), tmp_path / "back", threads=1, verify=True)
    assert same(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "source")) == []


def test_a_checkpoint_of_another_tower_is_refused(tmp_path: Path) -> None:
    _, out = converted(tmp_path, "qwen3_vl")
    deeper = MODELS["qwen3_vl"] | {"vision_config": MODELS["qwen3_vl"]["vision_config"] | {"depth": 5}}
    original = write_checkpoint(tmp_path / "deeper", deeper)
    with refused("megatron.shape", about="vision_model.decoder.layers.self_attention.linear_qkv.layer_norm_weight"):
        run.megatron_to_hf(out, original)
