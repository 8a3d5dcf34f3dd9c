"""Qwen3-Next and Qwen3.5: their tables, what engines hold, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.families import ModelSpec, qwen3_5, qwen3_5_moe, qwen3_next, read_model
from slimx.preflight.checks.exact import covers_model
from slimx.preflight.checks.layout import check_layout
from slimx.preflight.memory.engine import kv_bytes
from tests.refusals import refused

NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Sizes in the config.json of the published Qwen3-Next-80B-A3B-Instruct."""
TINY = NEXT | {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
)
"""Fields that a dense model does not have."""


def read(tmp_path: Path, hf: dict[str, Any]) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(hf))
    return read_model(tmp_path)


def run(tmp_path: Path, **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"path": str(tmp_path)},
            "trainer": trainer,
            "rollout": {"prompts": "p", "engines": [{"name": "actor"}]},
        }
    )


def test_the_published_model_has_its_parameters_and_three_delta_nets_to_one_attention(tmp_path: Path):
    spec = read(tmp_path, NEXT)
    shapes = spec.table.checkpoint_shapes()
    assert round(sum(map(math.prod, shapes.values())) / 1e9, 1) == 79.7
    assert spec.transformer["linear_attention_freq"] == [1, 1, 1, 0] * 12
    assert shapes["model.layers.0.linear_attn.in_proj_qkvz.weight"] == (12288, 2048)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (8192, 2048)


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForCausalLM"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_trainers_ranks_hold_every_element_of_the_checkpoint_once(tmp_path: Path, architecture: str, tensor: int):
    dense = architecture == "Qwen3_5ForCausalLM"
    hf = {key: value for key, value in TINY.items() if not (dense and key in EXPERTS)}
    spec = read(tmp_path, hf | {"architectures": [architecture]})
    parts = list(MegatronLayout(spec.table, Sizes(tensor=tensor, pipeline=2)).parts())
    check_coverage(spec.table.sources(), parts)
    shapes = {part.name: part.shape for part in parts}
    assert shapes["decoder.layers.0.self_attention.in_proj.weight"] == (136 // tensor, 64)
    assert shapes["decoder.layers.0.self_attention.conv1d.weight"] == (88 // tensor, 1, 4)


def test_only_layers_of_attention_have_a_kv_cache(tmp_path: Path):
    spec = read(tmp_path, NEXT)
    assert kv_bytes(spec.transformer, EngineSizes(), 2, None) == 2 * 12 * 2 * 256 * 2


def test_layers_of_multi_token_prediction_are_carried_over(tmp_path: Path):
    frozen = read(tmp_path, TINY).table.frozen
    assert frozen["mtp.fc.weight"] == (64, 128)
    assert frozen["mtp.layers.0.self_attn.q_proj.weight"] == (192, 64)
    assert frozen["mtp.layers.0.mlp.shared_expert_gate.weight"] == (1, 64)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "about"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_that_would_be_built_otherwise_is_refused(tmp_path: Path, field: dict[str, Any], about: str):
    with refused("model.unsupported", about=about):
        read(tmp_path, TINY | field)


def test_heads_and_layers_that_do_not_fit_each_other_are_refused(tmp_path: Path):
    with refused("model.field", about=str(tmp_path / "config.json")):
        read(tmp_path, TINY | {"linear_num_value_heads": 3})
    with refused("model.field", about=str(tmp_path / "config.json")):
        read(tmp_path, TINY | {"layer_types": ["linear_attention"]})


def test_context_parallelism_is_refused_by_name(tmp_path: Path):
    spec = read(tmp_path, TINY)
    check_layout(run(tmp_path, world_size=2, tensor=2).trainer, spec)
    with refused("layout.delta_net", about="trainer.context"):
        check_layout(run(tmp_path, world_size=2, context=2).trainer, spec)


def test_more_ranks_than_key_heads_are_refused(tmp_path: Path):
    spec = read(tmp_path, TINY | {"num_key_value_heads": 4, "linear_num_key_heads": 2})
    with refused("layout.delta_net", about="trainer.tensor"):
        check_layout(run(tmp_path, world_size=4, tensor=4).trainer, spec)


@pytest.mark.parametrize("family", [qwen3_5, qwen3_5_moe, qwen3_next])
def test_families_that_only_trainers_have_are_refused_to_engines(family: Any):
    with refused("model.no_engine", about=family.ARCHITECTURE):
        family.engine_table(TINY)


def test_exact_mode_does_not_cover_them(tmp_path: Path):
    spec = read(tmp_path, TINY)
    config = run(tmp_path)
    exact = config.numerics.model_copy(update={"mode": "exact"})
    assert len(list(covers_model.ask(exact, spec))) == 1
    assert not list(covers_model.ask(config.numerics, spec))
