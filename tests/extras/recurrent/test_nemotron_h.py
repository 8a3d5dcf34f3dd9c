"""Nemotron-H and Nemotron-3: their table, what they cost, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.config.sections.critic import Critic
from slimx.config.sections.objectives import LOSSES
from slimx.extras.megatron_files.directory import locations, numbers_layers
from slimx.extras.recurrent.families import nemotron_h
from slimx.extras.recurrent.rules import has_no_values
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec, read_model
from slimx.rules.layout import check_layout
from slimx.rules.unproven import unproven_layers
from tests.published import published
from tests.refusals import refused

ROOT = Path(__file__).parents[3]
NANO: dict[str, Any] = published("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
TINY = NANO | {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "hybrid_override_pattern": "ME*-",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "ssm_state_size": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}


def read(tmp_path: Path, hf: dict[str, Any]) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(hf))
    return read_model(tmp_path)


def run(tmp_path: Path, algorithm: str, **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"path": str(tmp_path)},
            "trainer": trainer,
            "rollout": {"prompts": "p", "engines": []},
            "algorithm": {"name": algorithm},
        }
    )


def test_the_published_model_has_its_parameters_and_layers(tmp_path: Path):
    spec = read(tmp_path, NANO)
    shapes = spec.table.checkpoint_shapes()
    assert round(sum(map(math.prod, shapes.values())) / 1e9, 1) == 31.6
    assert [spec.layer_kind.pattern.count(kind) for kind in "M*-E"] == [23, 6, 0, 23]
    assert spec.moe_layers == tuple(index for index, kind in enumerate(spec.layer_kind.pattern) if kind == "E")
    assert shapes["backbone.layers.0.mixer.in_proj.weight"] == (10304, 2688)
    assert shapes["backbone.layers.51.mixer.experts.127.down_proj.weight"] == (2688, 1856)


def test_a_request_keeps_three_inputs_per_convolution_and_a_state_per_head(tmp_path: Path):
    spec = read(tmp_path, NANO)
    channels, heads, head, state = 64 * 64 + 2 * 8 * 128, 64, 64, 128
    assert spec.layer_kind.state_elements(spec.transformer) == (23 * 3 * channels, 23 * heads * head * state)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_the_trainers_ranks_hold_every_element_of_the_checkpoint_once(tmp_path: Path, tensor: int):
    spec = read(tmp_path, TINY | {"num_key_value_heads": 4})
    parts = list(MegatronLayout(spec.table, Sizes(tensor=tensor, pipeline=2)).parts())
    check_coverage(spec.table.sources(), parts)
    shapes = {part.name: part.shape for part in parts}
    assert shapes["decoder.layers.0.mixer.in_proj.weight"] == (280 // tensor, 64)
    assert shapes["decoder.layers.0.mixer.conv1d_weight"] == (176 // tensor, 1, 4)
    assert shapes["decoder.layers.0.mixer.norm.weight"] == (96 // tensor,)


def test_a_rank_has_its_share_of_each_of_a_mixers_projections(tmp_path: Path):
    """Checks z, x, B, C and dt, which are concatenated in the checkpoint and split over the ranks."""
    layout = MegatronLayout(read(tmp_path, TINY).table, Sizes(tensor=2))
    (part,) = (part for part in layout.parts_of(1) if part.name == "decoder.layers.0.mixer.in_proj.weight")
    rows = [row for rect in part.rects for row in range(rect.row, rect.row + rect.rows)]
    bounds = [0, 96, 192, 232, 272, 280]
    halves = [range((start + end) // 2, end) for start, end in zip(bounds, bounds[1:], strict=False)]
    assert rows == [row for half in halves for row in half]


def test_checkpoints_name_layers_and_convolutions_as_megatron_core_does(tmp_path: Path):
    spec = read(tmp_path, TINY)
    assert numbers_layers(spec.transformer)
    keys = {location.key for location in locations(spec.table, per_layer=True)}
    assert {f"decoder.layers.0.mixer.conv1d.{kind}.{part}" for kind in ("weight", "bias") for part in "xBC"} <= keys
    assert {f"decoder.layers.0.mixer.in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")} <= keys


@pytest.mark.parametrize("mamba", ["mamba", "linear_attention"])
def test_layers_may_be_named_as_transformers_names_them(tmp_path: Path, mamba: str):
    pattern = TINY["hybrid_override_pattern"]
    names = {"M": mamba, "E": "moe", "*": "full_attention", "-": "mlp"}
    named = {key: value for key, value in TINY.items() if key != "hybrid_override_pattern"}
    spec = read(tmp_path, named | {"layers_block_type": [names[kind] for kind in pattern]})
    assert (spec.transformer, spec.table) == (read(tmp_path, TINY).transformer, read(tmp_path, TINY).table)


def test_a_model_without_experts_needs_no_field_of_theirs(tmp_path: Path):
    spec = read(tmp_path, TINY | {"hybrid_override_pattern": "M-*-"})
    assert spec.experts == 0 and "num_moe_experts" not in spec.transformer
    experts = ("n_routed_experts", "moe_shared_expert_intermediate_size", "num_experts_per_tok")
    dense = {key: value for key, value in TINY.items() if key not in experts}
    assert read(tmp_path, dense | {"hybrid_override_pattern": "M-*-"}).table == spec.table


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hybrid_override_pattern", "MEG*"),  # a gated delta net
        ("time_step_limit", [0.001, 0.1]),
        ("moe_latent_size", 32),  # of Nemotron-3-Super
        ("n_shared_experts", 2),
        ("norm_topk_prob", False),
        ("mlp_hidden_act", "silu"),
        ("mamba_hidden_act", "gelu"),
        ("conv_kernel", 3),
        ("layer_norm_epsilon", 1e-6),
        ("norm_eps", 1e-6),
        ("use_conv_bias", False),
        ("use_bias", True),
        ("attention_bias", True),
        ("residual_in_fp32", True),
        ("tie_word_embeddings", True),
        ("sliding_window", 128),
        ("num_nextn_predict_layers", 1),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_a_field_that_would_change_the_model_is_refused(tmp_path: Path, field: str, value: Any):
    with refused("model.unsupported", about=field):
        read(tmp_path, TINY | {field: value})


def test_a_pattern_must_have_as_many_layers_as_the_model(tmp_path: Path):
    with refused("model.field", about=str(tmp_path / "config.json")):
        read(tmp_path, TINY | {"num_hidden_layers": 5})


def test_infinity_may_be_written_as_python_or_as_transformers_writes_it(tmp_path: Path):
    for infinity in (float("inf"), {"__float__": "Infinity"}):
        read(tmp_path, TINY | {"time_step_limit": [0.0, infinity]})


def test_engines_are_refused():
    with refused("model.no_engine", about=nemotron_h.ARCHITECTURE):
        nemotron_h.engine_table(NANO)


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"tensor": 8, "world_size": 8}, "trainer.tensor"),
        ({"context": 2, "world_size": 2}, "trainer.context"),
    ],
)
def test_ranks_share_groups_of_heads_and_no_sequence(tmp_path: Path, sizes: dict[str, int], key: str):
    spec = read(tmp_path, TINY | {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 8})
    with refused("layout.state_space", about=key):
        check_layout(run(tmp_path, "sft", **sizes).trainer, spec)


def test_no_value_model_is_built_on_them(tmp_path: Path):
    spec = read(tmp_path, TINY)
    policy = run(tmp_path, "sft").algorithm
    reward = policy.model_copy(update={"loss": LOSSES["bradley_terry"](kind="bradley_terry")})
    for algorithm, critic, refusals in ((policy, None, 0), (policy, Critic(), 1), (reward, None, 1)):
        assert len([*has_no_values.ask(algorithm, critic, spec)]) == refusals


@pytest.mark.parametrize(
    ("trainer", "key"),
    [
        ({"qat": "int4"}, "trainer.qat"),
        ({"optimizer": {"kind": "muon"}, "distributed_optimizer": False}, "trainer.optimizer.kind"),
        ({"freeze": ["*router*"]}, "trainer.freeze"),
    ],
)
def test_ways_to_train_that_never_ran_on_them_are_refused(tmp_path: Path, trainer: dict[str, Any], key: str):
    spec = read(tmp_path, TINY)
    plain = run(tmp_path, "sft")
    assert [*unproven_layers.ask(plain.trainer, plain.rollout, plain.served, spec)] == []
    config = Config.model_validate(plain.model_dump() | {"trainer": trainer, "numerics": {"dtype": "bfloat16"}})
    assert [about for about, _ in unproven_layers.ask(config.trainer, config.rollout, config.served, spec)] == [key]


def test_decays_and_skips_stay_in_fp32_as_megatron_core_makes_them(tmp_path: Path):
    dtypes = {
        row.name.rpartition(".")[2]: row.dtype for row in read(tmp_path, TINY).table.rows if ".mixer." in row.name
    }
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {"A_log", "D"}
