"""Qwen3-Next and Qwen3.5: their tables, what engines hold, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimx.config.rule import broken
from slimx.config.schema import Config
from slimx.config.sections.engines import ServedEngines
from slimx.extras.planner.memory.engine import engine_memory, kv_bytes, state_bytes
from slimx.extras.recurrent.delta_nets import DeltaNets
from slimx.extras.recurrent.families import qwen3_5, qwen3_5_moe, qwen3_next
from slimx.extras.recurrent.hybrid import HybridLayers
from slimx.extras.recurrent.rules import states_are_not_shared
from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.families import ModelSpec, read_model
from slimx.models.layer_kind import LayerKind
from slimx.preflight.hardware import Machine
from slimx.reshard.plan.publication import publication_plan
from slimx.rules.layout import check_layout
from slimx.rules.unproven import unproven_layers
from tests.function_call import call_with_sglang
from tests.published import published
from tests.refusals import refused
from tests.unit.adapters.sglang_ranks import delta_net_model, described

ROOT = Path(__file__).parents[3]
NEXT: dict[str, Any] = published("Qwen3-Next-80B-A3B-Instruct")
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
ROTARY = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [4, 4, 4]}
TEXT: dict[str, Any] = {
    key: value for key, value in TINY.items() if key not in ("rope_theta", "decoder_sparse_step", "mlp_only_layers")
}
TEXT |= {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "rope_parameters": ROTARY}
"""Qwen3.5 with experts, as TINY."""
EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
)
"""Fields that a dense model does not have."""
DENSE = {key: value for key, value in TEXT.items() if key not in EXPERTS}
DENSE |= {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "tie_word_embeddings": True}


def read(tmp_path: Path, hf: dict[str, Any]) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(hf))
    return read_model(tmp_path)


def run(tmp_path: Path, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"path": str(tmp_path)},
            "rollout": {"prompts": "p", "engines": [{"name": "actor"}]},
            **sections,
        }
    )


def test_the_published_model_has_three_delta_nets_per_attention_layer(tmp_path: Path):
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
    assert kv_bytes(spec.transformer, spec.layer_kind, EngineSizes(), 2, None) == 2 * 12 * 2 * 256 * 2


def test_context_parallel_ranks_exchange_inputs_and_outputs_of_delta_nets(tmp_path: Path):
    spec = read(tmp_path, NEXT)
    shapes = {part.name: part.shape for part in MegatronLayout(spec.table, Sizes()).parts()}
    projected, put_out = (shapes[f"decoder.layers.0.self_attention.{name}.weight"] for name in ("in_proj", "out_proj"))
    assert spec.layer_kind.exchanged(spec.transformer) == projected[0] + put_out[1]


def test_layers_of_multi_token_prediction_are_carried_over(tmp_path: Path):
    frozen = read(tmp_path, TINY).table.frozen
    assert frozen["mtp.fc.weight"] == (64, 128)
    assert frozen["mtp.layers.0.self_attn.q_proj.weight"] == (192, 64)
    assert frozen["mtp.layers.0.mlp.shared_expert_gate.weight"] == (1, 64)


# Engines --------------------------------------------------------------------------------------------------------------


SPLITS = ((EngineSizes(), 0), (EngineSizes(tensor=2), 1), (EngineSizes(tensor=2, expert=2), 1))
"""Sizes of an engine, and the rank that is built."""


def served(path: str, rank: int, tensor: int, expert: int, copies: int) -> dict[str, Any]:
    """Returns one rank of SGLang's model of `path`, described."""
    attention = {"dp_size": copies, "enable_dp_attention": copies > 1}
    return described(delta_net_model(path, rank, tensor, ep_size=expert, **attention))


def test_the_engines_model_has_the_tensors_of_the_table(tmp_path: Path):
    """Checks SGLang's classes as built for CUDA, on one rank and on the last of two, also with attention replicated on
    two ranks: names, shapes, dtypes, and the location of each part of each tensor, by the loaded model's account."""
    wide = {"num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    copies = (EngineSizes(tensor=4, attention_data=2), 3)
    cases = [
        ("Next", NEXT | {"num_hidden_layers": 4, "num_experts": 16}, SPLITS),
        ("3.5 with experts", TEXT | wide, (*SPLITS, copies)),
        ("3.5", DENSE | wide, (*SPLITS[:2], copies)),
    ]
    splits = []
    for name, hf, of_model in cases:
        (tmp_path / name).mkdir()
        spec = read(tmp_path / name, hf)
        splits += [(spec, sizes, rank) for sizes, rank in of_model]
    for spec, sizes, rank in splits:
        found = call_with_sglang(served, str(spec.path), rank, sizes.tensor, sizes.expert, sizes.attention_data)
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


@pytest.mark.parametrize("encoding", ["hf", "local"])
def test_decays_are_published_in_fp32_and_all_else_as_it_is_trained(tmp_path: Path, encoding: str):
    spec = read(tmp_path, TINY)
    config = run(tmp_path, numerics={"dtype": "bfloat16"}, publish={"encoding": encoding})
    plan = publication_plan(config, spec, Sizes(), "cuda").plan
    sent = {tensor.name: tensor.dtype for buckets in plan.buckets for bucket in buckets for tensor in bucket.tensors}
    decays = {f"model.layers.{layer}.linear_attn.A_log" for layer in range(3)}
    assert {name for name, dtype in sent.items() if dtype == "float32"} == decays
    assert {dtype for name, dtype in sent.items() if name not in decays} == {"bfloat16"}


def test_more_engine_ranks_than_key_heads_are_refused():
    with refused("engine_layout.tensor", about="model.layers.{layer}.linear_attn.in_proj_qkvz.weight"):
        list(EngineLayout(qwen3_next.engine_table(NEXT | {"linear_num_key_heads": 2}), EngineSizes(tensor=4)).parts())


@pytest.mark.parametrize(
    ("field", "about"),
    [
        ({"full_attention_interval": None, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}, None),
        ({"rope_theta": None}, "rope_theta"),
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "layer_types"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
    ids=["interval", "rope", "layers", "tied"],
)
def test_an_engine_is_refused_a_model_that_it_would_misread(field: dict[str, Any], about: str | None):
    with refused("model.served_field", about=about or "full_attention_interval"):
        qwen3_next.engine_table(TINY | field)


@pytest.mark.parametrize(
    ("field", "about"),
    [
        ({"full_attention_interval": None}, "full_attention_interval"),
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {**ROTARY, "rope_type": None}}, "rope_type"),
    ],
    ids=["interval", "layers", "share", "axes"],
)
@pytest.mark.parametrize("family", [qwen3_5, qwen3_5_moe])
def test_an_engine_is_refused_a_qwen3_5_that_it_would_misread(family: Any, field: dict[str, Any], about: str):
    hf = DENSE if family is qwen3_5 else TEXT
    assert family.engine_table(hf).layers == 4
    with refused("model.served_field", about=about):
        family.engine_table(hf | field)


@pytest.mark.parametrize(("family", "hf"), [(qwen3_next, NEXT), (qwen3_5_moe, TEXT)])
def test_an_engine_is_refused_a_fused_shared_expert(family: Any, hf: dict[str, Any]):
    with refused("model.served_field", about="shared_expert_intermediate_size"):
        family.engine_table(hf, fused_shared_experts=True)


WITHOUT_RADIX = {"sglang": {"disable_radix_cache": True}}


@pytest.mark.parametrize(
    ("device", "engine", "about"),
    [
        ("cuda", WITHOUT_RADIX, []),
        ("cpu", {}, []),
        ("cuda", {}, ["disable_radix_cache"]),
        ("cpu", {"sglang": {"speculative_algorithm": "NEXTN"}}, ["speculative_algorithm"]),
        ("cuda", WITHOUT_RADIX | {"role": "decode"}, ["role"]),
    ],
    ids=["own states", "on the CPU", "prefix cache", "drafts", "roles"],
)
def test_states_that_requests_would_share_are_refused(
    tmp_path: Path, device: str, engine: dict[str, Any], about: list[str]
):
    spec = read(tmp_path, TINY)
    config = run(tmp_path)
    served = ServedEngines((config.rollout.engines[0].model_copy(update=engine),))
    facts = {"rollout": config.rollout, "served": served, "trainer": config.trainer, "device": device}
    rules = [states_are_not_shared, unproven_layers]
    found = broken(rules, facts | {"spec": spec})
    assert [problem.about.rpartition(".")[2] for problem in found] == about
    assert not broken(rules, facts | {"spec": SimpleNamespace(transformer={}, layer_kind=LayerKind(), path="")})


def test_recurrent_states_take_their_memory_from_the_kv_cache(tmp_path: Path):
    """Computes SGLang 0.5.23's split of memory: 36 delta nets with 32 heads of 128 x 128 in fp32, and three inputs of
    8,192 channels in bf16."""
    spec = read(tmp_path, NEXT)
    state = 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert state_bytes(spec.transformer, spec.layer_kind, EngineSizes(), "bfloat16", None) == state
    assert (
        state_bytes(spec.transformer, spec.layer_kind, EngineSizes(tensor=4, attention_data=2), "bfloat16", None)
        == state // 2
    )
    assert (
        state_bytes(spec.transformer, spec.layer_kind, EngineSizes(), "bfloat16", "bfloat16")
        == state - 36 * 32 * 128 * 128 * 2
    )
    assert state_bytes({}, LayerKind(), EngineSizes(), "bfloat16", None) == 0
    config = run(tmp_path, numerics={"dtype": "bfloat16"})
    machine = Machine(gpu=None, memory=200 * 2**30, per_node=8, nodes=1, host_memory=None)
    for options, slots in (({}, None), ({"max_mamba_cache_size": 64}, 64), ({"max_running_requests": 8}, 8)):
        group = config.rollout.engines[0].model_copy(update={"sglang": options | {"mem_fraction_static": 0.9}})
        memory = engine_memory(config, spec, group, machine, staged=0)
        room = memory.static - memory.weights
        if slots is None:
            slots = int(room * 0.9 / 1.9) // state - 1
        assert memory.state_per_request == state
        assert memory.kv_room == room - (slots + 1) * state
        longest = config.rollout.longest
        assert memory.concurrency == min(slots, memory.kv_room // memory.kv_per_token // longest)


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
    with refused("model.field", about="linear_num_value_heads"):
        read(tmp_path, TINY | {"linear_num_value_heads": 3})
    with refused("model.field", about="num_hidden_layers"):
        read(tmp_path, TINY | {"layer_types": ["linear_attention"]})


def test_more_ranks_than_key_heads_are_refused(tmp_path: Path):
    """Ranks of a tensor-parallel group share them, and those of a context-parallel group the heads of such a rank."""
    spec = read(tmp_path, TINY | {"num_key_value_heads": 4, "linear_num_key_heads": 2})
    for fits in ({"tensor": 2}, {"context": 2}):
        check_layout(run(tmp_path, trainer={"world_size": 2, **fits}).trainer, spec)
    with refused("layout.delta_net", about="trainer.tensor"):
        check_layout(run(tmp_path, trainer={"world_size": 4, "tensor": 4}).trainer, spec)
    for more in ({"context": 4}, {"tensor": 2, "context": 2}):
        with refused("layout.delta_net", about="trainer.context"):
            check_layout(run(tmp_path, trainer={"world_size": 4, **more}).trainer, spec)


@pytest.mark.parametrize(
    ("kind", "device", "packages", "torch"),
    [
        (DeltaNets(), "cuda", {"fla"}, False),
        (DeltaNets(), "cuda", {"transformer_engine"}, True),
        (HybridLayers("M*"), "cuda", {"mamba_ssm", "causal_conv1d"}, False),
        (HybridLayers("M*"), "cuda", {"mamba_ssm"}, True),
    ],
)
def test_the_log_says_what_computes_recurrent_layers(kind: LayerKind, device: str, packages: set[str], torch: bool):
    (reason,) = kind.kernels(device, packages)
    assert ("torch" in reason.split(":")[0]) is torch
    assert kind.kernels("cpu", packages) == (), "on CPUs there is no choice to explain"
