"""Which family a checkpoint belongs to, the dense families' tables, and families from outside."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from slimx import entry_points
from slimx.config.schema import Config
from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.families import GROUP, ModelSpec, configured_model, load_family, read_model, read_trunk
from slimx.rollout.client.generation import ModelShape
from slimx.rules.layout import check_layout
from tests.refusals import refused

QWEN3_32B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "max_position_embeddings": 40960,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_600M = QWEN3_32B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_32_1B = LLAMA_3_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_hidden_layers": 16,
    "rope_scaling": SCALING | {"factor": 32.0},
    "tie_word_embeddings": True,
}
PUBLISHED = {
    "Qwen3-32B": (QWEN3_32B, 32.76),
    "Qwen3-0.6B": (QWEN3_600M, 0.60),
    "Qwen2.5-7B": (QWEN25_7B, 7.62),
    "Llama-3-8B": (LLAMA_3_8B, 8.03),
    "Llama-3.2-1B": (LLAMA_32_1B, 1.24),
}
"""config.json and billions of parameters, as their pages have them."""


def read(directory: Path, hf: dict[str, Any], **how: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(hf))
    return read_model(directory, **how)


def run(directory: Path, **trainer: Any) -> Config:
    return Config.model_validate(
        {"run": {"dir": "r"}, "model": {"path": str(directory)}, "rollout": {"prompts": "p"}, "trainer": trainer}
    )


# The dense families ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_the_published_models_count(tmp_path: Path, name: str):
    hf, billions = PUBLISHED[name]
    spec = read(tmp_path, hf)
    shapes = spec.table.checkpoint_shapes()
    assert round(sum(map(math.prod, shapes.values())) / 1e9, 2) == billions and spec.experts == 0
    assert ("lm_head.weight" in shapes) == (not hf["tie_word_embeddings"])
    served = {name for entry in spec.engine_table().entries() for name in entry.sources}
    assert served == shapes.keys()


def test_the_last_stage_copies_a_tied_embedding_unless_it_has_a_value_head(tmp_path: Path):
    spec = read(tmp_path, QWEN3_600M)
    (copy,) = [part for part in MegatronLayout(spec.table, Sizes(pipeline=2)).parts_of(1) if part.copy]
    assert copy.name == "output_layer.weight" and copy.sources == ("model.embed_tokens.weight",)
    trunk = read_trunk(run(tmp_path).model)
    assert not trunk.gpt["share_embeddings_and_output_weights"]
    assert not [part for part in MegatronLayout(trunk.table, Sizes(pipeline=2)).parts_of(1) if part.copy]


@pytest.mark.parametrize("hf", [QWEN3_32B, QWEN25_7B, LLAMA_32_1B], ids=["Qwen3", "Qwen2.5", "Llama-3.2"])
def test_published_configs_read_like_those_of_transformers(tmp_path: Path, hf: dict[str, Any]):
    from transformers import AutoConfig

    kind = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
    published = read(tmp_path, hf | {"model_type": kind[hf["architectures"][0]]})
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved and "rope_theta" not in saved
    again = read_model(tmp_path)
    assert (again.transformer, again.gpt, again.table) == (published.transformer, published.gpt, published.table)


def test_llama_scales_its_positions_as_the_config_says(tmp_path: Path):
    plain, scaled = (read(tmp_path, hf).gpt for hf in (LLAMA_3_8B, LLAMA_32_1B))
    assert "rope_scaling" not in plain
    assert scaled["rope_scaling"] is True and scaled["rope_scaling_factor"] == 32.0


def test_megatron_has_the_constants_by_which_llama_is_refused_or_not():
    import inspect

    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    defaults = inspect.signature(RotaryEmbedding._apply_scaling).parameters
    for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        assert defaults[key].default == SCALING[key]


@pytest.mark.parametrize("hf", [hf for hf, _ in PUBLISHED.values()], ids=[*PUBLISHED])
def test_fields_are_those_of_megatrons_configuration(tmp_path: Path, hf: dict[str, Any]):
    from megatron.core.transformer import TransformerConfig

    assert read(tmp_path, hf).transformer.keys() <= {*TransformerConfig.__dataclass_fields__}


# Dense models in a run ------------------------------------------------------------------------------------------------


def test_expert_parallelism_of_a_dense_model_is_refused_on_both_sides(tmp_path: Path):
    spec = read(tmp_path, QWEN25_7B)
    check_layout(run(tmp_path, world_size=8, tensor=4).trainer, spec)
    with refused("layout.experts", about="trainer.expert"):
        check_layout(run(tmp_path, world_size=2, expert=2).trainer, spec)
    for sizes in (EngineSizes(tensor=2, expert=2), EngineSizes(redundant=2)):
        with refused("engine_layout.no_experts", about="rollout.engines.expert"):
            EngineLayout(spec.engine_table(), sizes)


def test_dp_attention_is_refused_if_sglang_does_not_support_it(tmp_path: Path):
    sizes = EngineSizes(tensor=4, attention_data=2)
    EngineLayout(read(tmp_path, QWEN3_32B).engine_table(), sizes)
    for hf in (QWEN25_7B, LLAMA_3_8B):
        with refused("engine_layout.dp_attention", about="rollout.engines.dp_attention"):
            EngineLayout(read(tmp_path, hf).engine_table(), sizes)


def test_a_dense_model_has_no_routes_to_ask_for(tmp_path: Path):
    shape = ModelShape.of(read(tmp_path, QWEN25_7B))
    assert shape == ModelShape(vocab_size=152064, layers=28, top_k=0, experts=0)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hf", "changes", "named"),
    [
        (QWEN3_32B, {"attention_bias": True}, "attention_bias"),
        (QWEN3_32B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        (QWEN25_7B, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN25_7B, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN25_7B, {"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        (LLAMA_3_8B, {"attention_bias": True}, "attention_bias"),
        (LLAMA_32_1B, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA_32_1B, {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling"),
        (LLAMA_32_1B, {"rope_scaling": SCALING | {"high_freq_factor": 8.0}}, "rope_scaling.high_freq_factor"),
        (
            LLAMA_32_1B,
            {"rope_scaling": SCALING | {"original_max_position_embeddings": 4096}},
            "rope_scaling.original_max_position_embeddings",
        ),
        (LLAMA_32_1B, {"rope_scaling": SCALING | {"type": "yarn"}}, "rope_scaling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_would_change_the_computation_is_refused(tmp_path: Path, hf, changes, named: str):
    with refused("model.unsupported", about=named):
        read(tmp_path, hf | changes)


def test_an_unknown_architecture_is_refused_by_its_name(tmp_path: Path):
    with refused("model.unknown", about="BertModel"):
        read(tmp_path, QWEN3_32B | {"architectures": ["BertModel"]})


# From outside ---------------------------------------------------------------------------------------------------------


def test_an_outside_family_is_short_and_not_registered():
    import examples.mixtral as mixtral

    assert len(Path(mixtral.__file__).read_text().splitlines()) < 100
    assert mixtral.ARCHITECTURE not in entry_points.find(GROUP)


def test_the_configuration_names_the_family(tmp_path: Path):
    mixtral = LLAMA_3_8B | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "vocab_size": 32000,
    }
    config = run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    with refused("model.unknown", about="MixtralForCausalLM"):
        configured_model(config)
    named = config.model_copy(update={"model": config.model.model_copy(update={"family": "examples.mixtral"})})
    spec = configured_model(named)
    assert spec.experts == 8 and round(sum(map(math.prod, spec.table.checkpoint_shapes().values())) / 1e9, 1) == 46.7
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    with refused("model.other_family", about="LlamaForCausalLM"):
        configured_model(named)


@pytest.mark.parametrize(
    ("text", "code", "about", "named"),
    [
        (None, "dotted.import", "model.family", "PYTHONPATH"),
        ("1 / 0", "dotted.raised", "model.family", "ZeroDivisionError"),
        ('ARCHITECTURE = "A"\ndef unsupported(hf): ...\n', "model.family_part", "transformer_config", "weight_table"),
    ],
)
def test_a_module_that_defines_no_family_is_refused(
    tmp_path: Path, monkeypatch, text: str | None, code: str, about: str, named: str
):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_family", raising=False)
    if text is not None:
        (tmp_path / "some_family.py").write_text(text)
    with refused(code, about=about) as error:
        load_family("some_family")
    assert "some_family" in str(error.value) and named in str(error.value)
