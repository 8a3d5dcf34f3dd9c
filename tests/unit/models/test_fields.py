"""An unread field of config.json that could change what the model computes is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimx import entry_points
from slimx.models.families import GROUP, Family, load_family, read_model
from slimx.models.fields import TrackedFields
from tests.checkpoint_stand import QWEN3_MOE
from tests.extras.families.test_glm_and_minimax import FLASH, GLM, MINIMAX
from tests.extras.families.test_gpt_oss import HF as GPT_OSS
from tests.extras.recurrent.test_delta_net import EXPERTS, NEXT
from tests.extras.recurrent.test_nemotron_h import TINY as NEMOTRON
from tests.extras.vision.test_gated_towers import GLM as GLM_VISION
from tests.extras.vision.test_gated_towers import QWEN as QWEN_VISION
from tests.published import DEEPSEEK_V3 as V3
from tests.published import published
from tests.refusals import refused
from tests.towers import SHALLOW
from tests.unit.models.test_families import LLAMA_32_1B, QWEN3_32B, QWEN25_7B

ROOT = Path(__file__).parents[3]
OUTSIDE = {"MixtralForCausalLM": "examples.mixtral"}
MIXTRAL = {key: value for key, value in QWEN3_32B.items() if key != "use_sliding_window"} | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
KNOWN: dict[str, dict[str, Any]] = {
    hf["architectures"][0]: {**hf, "num_hidden_layers": 4}
    for hf in (V3, FLASH, GLM, GPT_OSS, LLAMA_32_1B, MINIMAX, QWEN25_7B, QWEN3_32B, QWEN3_MOE, MIXTRAL, NEMOTRON)
}
GATED = ("Qwen2_5_VLForConditionalGeneration", "Glm4vMoeForConditionalGeneration")
"""Those with a vision tower of gated MLPs."""
KNOWN[GATED[0]] = {key: value for key, value in QWEN_VISION.items() if key != "max_window_layers"} | {
    "num_hidden_layers": 4
}
KNOWN[GATED[1]] = GLM_VISION | {"text_config": GLM_VISION["text_config"] | {"num_hidden_layers": 4}}
WITHOUT_POSITIONS = {"NemotronHForCausalLM"}
HYBRID = ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForCausalLM")
"""Those with layers of two kinds."""
KNOWN |= {name: {**NEXT, "architectures": [name], "num_hidden_layers": 4} for name in HYBRID}
KNOWN["Qwen3_5ForCausalLM"] = {key: value for key, value in KNOWN["Qwen3_5ForCausalLM"].items() if key not in EXPERTS}
KNOWN["MiMoForCausalLM"] = KNOWN["Qwen2ForCausalLM"] | {"architectures": ["MiMoForCausalLM"]}
KNOWN["KimiK25ForConditionalGeneration"] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {key: value for key, value in KNOWN["DeepseekV3ForCausalLM"].items() if "quant" not in key},
    "vision_config": published("Kimi-K2.5")["vision_config"],
    "media_placeholder_token_id": 7,
}
NESTED = {
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""Vision-language models, and the models whose layers their language models have."""
KNOWN |= {
    name: {"architectures": [name], "text_config": KNOWN[text], "vision_config": SHALLOW, "image_token_id": 7}
    for name, text in NESTED.items()
}
for _name in ("DeepSeek-V3.2", "GLM-5", "Ling-flash-2.0"):
    _hf = published(_name)
    _older = {"rope_theta": _hf.pop("rope_parameters", _hf)["rope_theta"]}  # the form that the other files have
    KNOWN[_hf["architectures"][0]] = {**_hf, **_older, "num_hidden_layers": 4}
for _architecture, _fields in (
    ("GptOssForCausalLM", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("MiniMaxM2ForCausalLM", {"attn_type_list": [1] * 4}),
):
    KNOWN[_architecture] |= _fields
IDLE = {
    "auto_map": {"AutoConfig": "configuration.Config"},
    "dtype": "bfloat16",
    "transformers_version": "4.46.1",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "use_cache": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "logit_scale": None,
}
"""Fields without a meaning for what is computed, and one that would have one."""


def family_of(architecture: str) -> Family | None:
    return load_family(OUTSIDE[architecture]) if architecture in OUTSIDE else None


def with_text(hf: dict[str, Any], *without: str, **changes: Any) -> tuple[dict[str, Any], str]:
    """Returns a config.json whose text has `changes` and no field of `without`, and its fields' prefix in refusals."""
    if "text_config" in hf:
        return {**hf, "text_config": with_text(hf["text_config"], *without, **changes)[0]}, "text_config."
    return {key: value for key, value in hf.items() if key not in without} | changes, ""


def read(directory: Path, hf: dict[str, Any]):
    (directory / "config.json").write_text(json.dumps(hf))
    return read_model(directory, family=family_of(hf["architectures"][0]))


def test_every_family_is_tested():
    assert set(KNOWN) == entry_points.find(GROUP).keys() | OUTSIDE.keys()


@pytest.mark.parametrize("architecture", sorted(KNOWN))
def test_fields_without_a_meaning_change_nothing(tmp_path: Path, architecture: str):
    plain, more = (read(tmp_path, fields) for fields in (KNOWN[architecture], {**IDLE, **KNOWN[architecture]}))
    assert (more.transformer, more.gpt, more.table) == (plain.transformer, plain.gpt, plain.table)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_scale", 0.5),
        ("use_parallel_residual", False),
        ("attention_dropout", 0.1),
        ("layer_types", ["full_attention", "linear_attention"] * 2),
        ("sliding_window", 128),
        ("dual_chunk_attention_config", {"chunk_size": 8192}),
    ],
)
@pytest.mark.parametrize("architecture", sorted(KNOWN))
def test_a_field_that_may_change_the_computation_is_refused_by_name(
    tmp_path: Path, architecture: str, field: str, value: Any
):
    if (architecture, field) == ("GptOssForCausalLM", "sliding_window"):
        field = "sliding_window_size"  # it has a window, under its own name
    hybrid = NESTED.get(architecture, architecture) in HYBRID
    if hybrid and field == "layer_types":
        value = ["sliding_attention"] * 4
    switches = () if architecture == "GptOssForCausalLM" else ("sliding_window", "use_sliding_window")
    hf, within = with_text(KNOWN[architecture], *switches, **{field: value})
    unsupported = (architecture, field) in (
        *((name, "layer_types") for name in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM")),
        ("MixtralForCausalLM", "sliding_window"),
        ("NemotronHForCausalLM", "sliding_window"),
    )
    unsupported = unsupported or (hybrid and field == "layer_types")
    with refused("model.unsupported" if unsupported else "model.field_unread", about=within + field):
        read(tmp_path, hf)


@pytest.mark.parametrize("architecture", sorted(KNOWN.keys() - WITHOUT_POSITIONS))
@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_another_scaling_of_positions_is_refused_by_name(tmp_path: Path, architecture: str, form: str):
    changed = {form: {"rope_type": "longrope", "factor": 2.0}}
    hf, within = with_text(KNOWN[architecture], "rope_scaling", **changed)
    with refused("model.unsupported", about=within + form):
        read(tmp_path, hf)


@pytest.mark.parametrize("architecture", sorted(KNOWN.keys() - WITHOUT_POSITIONS))
def test_an_unread_field_of_the_rope_scaling_is_refused_by_name(tmp_path: Path, architecture: str):
    known = KNOWN[architecture].get("text_config", KNOWN[architecture])
    reads_sections = architecture in GATED or architecture.startswith(("Qwen3_5", "Qwen3VL"))
    name = "long_factor" if reads_sections else "mrope_section"
    scaling = {**(known.get("rope_scaling") or {}), name: [16, 24, 24]}
    hf, within = with_text(KNOWN[architecture], rope_scaling=scaling)
    with refused("model.field_unread", about=f"{within}rope_scaling.{name}"):
        read(tmp_path, hf)


@pytest.mark.parametrize("switched", [True, None])
def test_a_window_means_nothing_only_where_it_is_switched_off(tmp_path: Path, switched: bool | None):
    assert QWEN25_7B["sliding_window"] and QWEN25_7B["use_sliding_window"] is False
    read(tmp_path, QWEN25_7B)
    with refused("model.unsupported" if switched else "model.field_unread") as error:
        read(tmp_path, QWEN25_7B | {"use_sliding_window": switched})
    assert error.value.about == ("use_sliding_window" if switched else "sliding_window")


def test_a_rope_base_stated_twice_must_agree(tmp_path: Path):
    twice = QWEN3_32B | {"rope_parameters": {"rope_type": "default", "rope_theta": QWEN3_32B["rope_theta"]}}
    assert read(tmp_path, twice).gpt == read(tmp_path, QWEN3_32B).gpt
    with refused("model.field_unread", about="rope_theta"):
        read(tmp_path, twice | {"rope_theta": 1.0})


@pytest.mark.parametrize("directory", sorted((ROOT / "configs/moe/models").iterdir()), ids=lambda path: path.name)
def test_the_published_configurations_are_read(directory: Path):
    assert read_model(directory).table.rows


def test_a_copy_of_the_fields_counts_as_unread():
    """A family that reads a copy is refused more than it must be, and never less."""
    fields = TrackedFields({"logit_scale": 2.0, "within": {"a": 1, "b": 2}})
    assert {**fields}["logit_scale"] == 2.0 and fields["within"]["a"] == 1
    assert [*fields.unread()] == ["logit_scale", "within.b"]


def test_a_family_from_outside_declares_its_unsupported_field_values(tmp_path: Path):
    def unsupported(hf: dict[str, Any]) -> str | None:
        return "num_key_value_heads by layer" if isinstance(hf["num_key_value_heads"], list) else None

    family = SimpleNamespace(**{**vars(load_family("examples.mixtral")), "unsupported": unsupported})
    hf = MIXTRAL | {"num_key_value_heads": [8, 4]}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with refused("model.field", about="num_key_value_heads"):
        read_model(tmp_path, family=family)
    family.UNCHECKED_FIELDS = ("num_key_value_heads",)
    with refused("model.unsupported", about="num_key_value_heads"):
        read_model(tmp_path, family=family)
    (tmp_path / "config.json").write_text(json.dumps(hf | {"vocab_size": "many"}))
    with refused("model.field", about="vocab_size"):
        read_model(tmp_path, family=family)
