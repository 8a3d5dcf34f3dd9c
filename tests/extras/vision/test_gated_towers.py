"""Qwen2.5-VL and GLM-4.5V: their tables, what engines hold of them, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.extras.vision.families import glm4v_moe, qwen2_5_vl
from slimx.extras.vision.family import VisionFamily
from slimx.extras.vision.layer_kinds import WithTower
from slimx.extras.vision.towers.rows import PadEach
from slimx.layout.engine import EngineLayout
from slimx.layout.maps import Rect
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage, matrix
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import Row, check_row
from slimx.models.families import ModelSpec, read_model
from tests.extras.families.test_glm_and_minimax import AIR
from tests.function_call import call_with_sglang
from tests.refusals import refused
from tests.unit.adapters.sglang_ranks import built, described, join, pretend_hopper
from tests.unit.models.test_families import QWEN25_7B

TOKENS = {"image_token_id": 100, "video_token_id": 101}
QWEN: dict[str, Any] = QWEN25_7B | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "vision_token_id": 102,
    "vision_start_token_id": 103,
    "vision_end_token_id": 104,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    **TOKENS,
}
"""config.json of Qwen/Qwen2.5-VL-7B-Instruct."""
TEXT = {key: value for key, value in AIR.items() if key not in ("architectures", "num_nextn_predict_layers")}
GLM: dict[str, Any] = {
    "architectures": ["Glm4vMoeForConditionalGeneration"],
    "model_type": "glm4v_moe",
    "text_config": {
        **TEXT,
        "model_type": "glm4v_moe_text",
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        "image_token_id": 100,
    },
    "vision_config": {
        "attention_bias": False,
        "depth": 24,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "image_size": 336,
        "in_channels": 3,
        "intermediate_size": 10944,
        "model_type": "glm4v_moe_vision",
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    **{f"{kind}_{end}_token_id": 105 for kind in ("image", "video") for end in ("start", "end")},
    **TOKENS,
}
"""A GLM-4.5V, whose language model is that of GLM-4.5-Air."""
TINY_QWEN = QWEN | {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]},
    "vision_config": QWEN["vision_config"]
    # 92 / 2 rows per rank, of which the last rank has two less than SGLang gives it.
    | {"depth": 2, "hidden_size": 64, "intermediate_size": 90, "num_heads": 4, "out_hidden_size": 128},
}
TINY_GLM = GLM | {
    "text_config": GLM["text_config"]
    | {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
    },
    "vision_config": GLM["vision_config"]
    | {
        "depth": 2,
        "hidden_size": 64,
        "image_size": 56,
        "intermediate_size": 160,
        "num_heads": 4,
        "out_hidden_size": 128,
    },
}


def read(directory: Path, hf: dict[str, Any]) -> ModelSpec:
    family: VisionFamily = qwen2_5_vl.DENSE if "Qwen" in hf["architectures"][0] else glm4v_moe.MOE
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    return read_model(directory, family=family)


def nested(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json of a Qwen2.5-VL as newer versions of transformers write it."""
    top = ("architectures", "model_type", "vision_config", "tie_word_embeddings", *TOKENS)
    text = {key: value for key, value in hf.items() if key not in (*top, "rope_scaling", "rope_theta")}
    rotary = {"rope_type": "default", "rope_theta": hf["rope_theta"], "mrope_section": [16, 24, 24]}
    return {**{key: hf[key] for key in top}, "text_config": {**text, "rope_parameters": rotary}}


# Trainers -------------------------------------------------------------------------------------------------------------


def test_published_files_of_qwen2_5_vl_have_the_text_at_the_top_level(tmp_path: Path):
    spec = read(tmp_path, QWEN)
    shapes = spec.table.checkpoint_shapes()
    assert round(sum(map(math.prod, shapes.values())) / 1e9, 2) == 8.29
    assert shapes["model.layers.27.self_attn.q_proj.bias"] == (3584,)
    assert shapes["visual.blocks.31.mlp.gate_proj.weight"] == (3420, 1280)
    assert shapes["visual.patch_embed.proj.weight"] == (1280, 3, 2, 14, 14)
    newer = read(tmp_path, nested(QWEN))
    assert (newer.transformer, newer.gpt, newer.table) == (spec.transformer, spec.gpt, spec.table)


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_of_qwen2_5_vl_may_repeat_the_embedding(tmp_path: Path, tied: bool):
    spec = read(tmp_path, TINY_QWEN | {"tie_word_embeddings": tied})
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    assert (spec.table.aliases, spec.gpt["share_embeddings_and_output_weights"]) == (aliases, tied)


def test_a_glm_4_5v_has_the_names_of_published_files(tmp_path: Path):
    spec = read(tmp_path, GLM)
    shapes = spec.table.checkpoint_shapes()
    assert shapes["model.language_model.layers.45.mlp.experts.127.down_proj.weight"] == (4096, 1408)
    assert shapes["model.visual.blocks.23.mlp.gate_proj.weight"] == (4096, 1536)
    assert shapes["model.visual.merger.gate_proj.weight"] == (10944, 4096)
    assert shapes["model.visual.downsample.weight"] == (4096, 1536, 2, 2)
    assert shapes["model.visual.embeddings.position_embedding.weight"] == (576, 1536)
    assert spec.gpt["rotary_percent"] == 0.5 and spec.transformer["add_qkv_bias"]


@pytest.mark.parametrize("hf", [TINY_QWEN, TINY_GLM], ids=["Qwen2.5-VL", "GLM-4.5V"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_trainers_hold_every_element_of_the_checkpoint_once(tmp_path: Path, hf: dict[str, Any], tensor: int):
    spec = read(tmp_path, hf)
    parts = list(MegatronLayout(spec.table, Sizes(tensor=tensor, pipeline=2)).parts())
    check_coverage(spec.table.sources(), parts)
    assert {part.ranks[0] for part in parts if part.name.startswith("visual.")} == {0}


@pytest.mark.parametrize(
    ("hf", "axes"),
    [(QWEN, [16, 24, 24]), (GLM, [8, 12, 12])],
    ids=["Qwen2.5-VL", "GLM-4.5V"],
)
def test_each_axis_of_positions_has_consecutive_frequencies(tmp_path: Path, hf: dict[str, Any], axes: list[int]):
    family: Any = read(tmp_path, hf).family
    tower = family._tower(hf)
    assert list(tower.axes) == sorted(tower.axes) and [tower.axes.count(axis) for axis in range(3)] == axes
    assert tower.levels == 0 and isinstance(family.layer_kind(hf), WithTower)


def test_layers_of_multi_token_prediction_are_carried_over(tmp_path: Path):
    text = TINY_GLM["text_config"] | {"num_nextn_predict_layers": 1}
    spec = read(tmp_path, TINY_GLM | {"text_config": text})
    assert spec.prediction_layers == 0
    assert spec.table.frozen["model.language_model.layers.2.eh_proj.weight"] == (128, 256)


# Engines --------------------------------------------------------------------------------------------------------------


def test_each_source_is_padded_before_it_is_split():
    rows = PadEach(8).local([(10, 3), (10, 3)], 0, 1, 2)
    assert rows == ((16, 3), [Rect(0, 8, 0, 2, 3, 0, 0), Rect(1, 8, 0, 2, 3, 8, 0)])
    assert PadEach(8).local([(10, 3)], 0, 3, 4) == ((4, 3), [])
    assert PadEach(8).local([(3, 10)], 1, 1, 2) == ((3, 8), [Rect(0, 0, 8, 3, 2, 0, 0)])
    assert PadEach(1).local([(10, 3)], 0, 0, 2) == ((5, 3), [Rect(0, 0, 0, 5, 3, 0, 0)])
    check_row(Row("local", (("a", (10, 3)), ("b", (10, 3))), PadEach(8), axis=0), 0)
    with refused("maps.share"):
        PadEach(8).local([(10, 3)], 0, 0, 3)


def served(path: str, rank: int, tensor: int, expert: int, copies: int, weights: str | None) -> dict[str, Any]:
    """Returns one rank of SGLang's model of `path`, described, or writes its parameters to the file `weights`."""
    from sglang.srt.layers import linear, vocab_parallel_embedding

    pretend_hopper()
    from sglang.srt.models import glm4v_moe, qwen2_5_vl

    linear._is_cpu = vocab_parallel_embedding._is_cpu = qwen2_5_vl._is_cpu = False  # a CPU pads otherwise
    (architecture,) = json.loads((Path(path) / "config.json").read_text())["architectures"]
    kinds = {kind.__name__: kind for kind in (*qwen2_5_vl.EntryClass, *glm4v_moe.EntryClass)}
    arguments = {"ep_size": expert, "dp_size": copies, "enable_dp_attention": copies > 1}
    model = built(join(path, rank, tensor, **arguments), "meta" if weights is None else "cpu", kind=kinds[architecture])
    if weights is None:
        return described(model)
    for parameter in model.parameters():
        parameter.data.fill_(7)
    model.load_weights(load_file(f"{path}/model.safetensors").items())
    save_file({name: tensor.detach().clone() for name, tensor in model.named_parameters()}, weights)
    return {}


CASES = (
    ("Qwen2.5-VL", TINY_QWEN, EngineSizes(), 0),
    ("Qwen2.5-VL", TINY_QWEN, EngineSizes(tensor=2), 0),
    ("Qwen2.5-VL", TINY_QWEN, EngineSizes(tensor=2), 1),
    ("GLM-4.5V", TINY_GLM, EngineSizes(), 0),
    ("GLM-4.5V", TINY_GLM, EngineSizes(tensor=2), 1),
    ("GLM-4.5V", TINY_GLM, EngineSizes(tensor=2, expert=2), 1),
    ("GLM-4.5V", TINY_GLM, EngineSizes(tensor=4, attention_data=2), 3),
)
"""Name, config.json, sizes of an engine, and the rank that is built."""


def test_the_engines_model_has_the_tensors_of_the_table(tmp_path: Path):
    """Checks SGLang's classes as built for CUDA: names, shapes, dtypes, and the location of each part of each tensor,
    by the loaded model's account."""
    for name, hf, sizes, rank in CASES:
        spec = read(tmp_path / name, hf)
        found = call_with_sglang(served, spec.path, rank, sizes.tensor, sizes.expert, sizes.attention_data, None)
        parts = [part for part in EngineLayout(spec.engine_table(), sizes).parts() if rank in part.ranks]
        assert found["parameters"] == {part.name: [list(part.shape), part.dtype or "bfloat16"] for part in parts}
        assert found["uncovered"] == {}
        shapes = spec.table.checkpoint_shapes()
        assert found["places"] == {n: list(shape) for n, shape in shapes.items() if n not in spec.table.aliases}
        assert found["held"] == sorted(
            [part.name, part.sources[r.source], r.row, r.col, r.rows, r.cols, r.local_row, r.local_col]
            for part in parts
            for r in part.rects
        )


@pytest.mark.parametrize(
    ("hf", "tensor", "rank"), [(TINY_QWEN, 1, 0), (TINY_QWEN, 2, 1), (TINY_GLM, 2, 1)], ids=["one", "last", "GLM-4.5V"]
)
def test_an_engine_that_loads_a_checkpoint_holds_what_the_table_says(
    tmp_path: Path, hf: dict[str, Any], tensor: int, rank: int
):
    """The inner size of Qwen2.5-VL's tower is padded with zeros."""
    spec = read(tmp_path / "model", hf)
    shapes = spec.table.checkpoint_shapes()
    weights = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items() if name not in spec.table.aliases}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    call_with_sglang(served, spec.path, rank, tensor, 1, 1, str(tmp_path / "loaded"))
    loaded = load_file(tmp_path / "loaded")
    padded = set()
    for part in EngineLayout(spec.engine_table(), EngineSizes(tensor=tensor)).parts():
        if rank not in part.ranks:
            continue
        local = torch.zeros(matrix(part.shape))
        for r in part.rects:
            source = weights[part.sources[r.source]]
            piece = source.view(matrix(source.shape))[r.row : r.row + r.rows, r.col : r.col + r.cols]
            local[r.local_row : r.local_row + r.rows, r.local_col : r.local_col + r.cols] = piece
        assert torch.equal(loaded.pop(part.name).view(local.shape).float(), local), part.name
        if sum(r.rows * r.cols for r in part.rects) < local.numel() and "visual" in part.name:
            padded.add(part.name.split(".", 3)[3])
    assert not loaded
    expected = (
        {"mlp.gate_up_proj.weight", "mlp.gate_up_proj.bias", "mlp.down_proj.weight"} if "Qwen" in str(hf) else set()
    )
    assert padded == expected


def test_an_engine_of_qwen2_5_vl_with_other_patches_is_refused(tmp_path: Path):
    spec = read(tmp_path, QWEN | {"vision_config": QWEN["vision_config"] | {"patch_size": 16}})
    with refused("model.served_field", about="vision_config.patch_size"):
        spec.engine_table()


def test_attention_of_qwen2_5_vl_has_one_copy_in_an_engine(tmp_path: Path):
    table = read(tmp_path, QWEN).engine_table()
    with refused("engine_layout.dp_attention"):
        EngineLayout(table, EngineSizes(tensor=2, attention_data=2))


def test_fused_shared_experts_have_their_nested_names(tmp_path: Path):
    spec = read(tmp_path, TINY_GLM)
    parts = EngineLayout(spec.engine_table(fused_shared_experts=True), EngineSizes()).parts()
    down = next(part for part in parts if part.name.endswith("experts.w2_weight"))
    assert down.sources[-1] == "model.language_model.layers.1.mlp.shared_experts.down_proj.weight"
    assert spec.unfused(cpu=False, expert=2) and spec.unfused(cpu=False, expert=1) is None


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hf", "section", "field", "about"),
    [
        (QWEN, None, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN, None, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN, None, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling"),
        (QWEN, "vision_config", {"hidden_act": "gelu"}, "vision_config.hidden_act"),
        (nested(QWEN), "text_config", {"hidden_act": "gelu"}, "text_config.hidden_act"),
        (GLM, "text_config", {"attention_bias": False}, "text_config.attention_bias"),
        (GLM, "text_config", {"use_qk_norm": True}, "text_config.use_qk_norm"),
        (GLM, "text_config", {"tie_word_embeddings": True}, "text_config.tie_word_embeddings"),
        (GLM, "vision_config", {"hidden_act": "gelu"}, "vision_config.hidden_act"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and len(value) < 3 else None,
)
def test_a_field_that_would_be_built_otherwise_is_refused(
    tmp_path: Path, hf: dict[str, Any], section: str | None, field: dict[str, Any], about: str
):
    changed = hf | field if section is None else hf | {section: hf[section] | field}
    if "tie_word_embeddings" in field:
        changed |= field
    with refused("model.unsupported", about=about):
        read(tmp_path, changed)


def test_sections_that_do_not_fit_a_head_are_refused(tmp_path: Path):
    family: Any = read(tmp_path, QWEN).family
    with refused("vision.sections"):
        family._tower(QWEN | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 20]}})
