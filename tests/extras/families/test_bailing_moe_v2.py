"""Ling-2 and Ring-2: what the tables name, what is refused, and that SGLang's own class holds what its table says.
Against the published modelling: tests/integration/test_families.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.config.schema import Config
from slimx.extras.families import bailing_moe_v2
from slimx.layout.engine import EngineLayout
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.families import ModelSpec, read_model
from slimx.reshard.plan.publication import publication_plan
from tests.function_call import call_with_sglang
from tests.integration.bailing_oracle import TINY, Ling, write
from tests.integration.family_oracle import scatter
from tests.published import published
from tests.refusals import refused
from tests.unit.adapters.engine_model import rank_local
from tests.unit.adapters.sglang_ranks import built, join

ROOT = Path(__file__).parents[3]
FLASH: dict[str, Any] = published("Ling-flash-2.0")
MINI = FLASH | {
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_hidden_layers": 20,
}
SMALL = FLASH | {"num_hidden_layers": 2, "num_experts": 16}
ENGINES = ((1, 1, 0), (2, 1, 0), (2, 1, 1), (2, 2, 1))
"""Tensor and expert parallel size, and rank."""


def read(directory: Path, hf: dict[str, Any], **how: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(hf))
    return read_model(directory, **how)


def run(directory: Path, sglang: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(directory)},
            "model": {"path": str(directory)},
            "numerics": {"dtype": "bfloat16"},
            "rollout": {"prompts": "p", "engines": [{"name": "actor", "tensor": 2, "sglang": sglang}]},
            **sections,
        }
    )


@pytest.mark.parametrize(("hf", "billions"), [(MINI, 16.26), (FLASH, 102.89)], ids=["mini", "flash"])
def test_parameters_are_as_many_as_the_published_files_hold(tmp_path: Path, hf: dict[str, Any], billions: float):
    shapes = read(tmp_path, hf).table.checkpoint_shapes()
    assert round(sum(map(math.prod, shapes.values())) / 1e9, 2) == billions


def test_an_engine_takes_every_tensor_of_the_checkpoint():
    table = bailing_moe_v2.engine_table(SMALL)
    taken = {name for part in EngineLayout(table, EngineSizes(tensor=4)).parts() for name in part.sources}
    assert taken == set(bailing_moe_v2.weight_table(SMALL).checkpoint_shapes())


def test_the_prediction_layer_is_carried_over_or_built(tmp_path: Path):
    hf = SMALL | {"num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0.1}
    unbuilt, built = read(tmp_path, hf).table, read(tmp_path, hf, mtp_layers=1).table
    assert not built.frozen and not built.aliases and not unbuilt.aliases
    shapes = built.checkpoint_shapes()
    assert unbuilt.frozen == {name: shape for name, shape in shapes.items() if name.startswith("model.layers.2.")}
    mtp_names = {"eh_proj.weight", "enorm.weight", "hnorm.weight", "final_layernorm.weight", "mlp.gate.expert_bias"}
    assert mtp_names < {name.removeprefix("model.layers.2.") for name in unbuilt.frozen}
    assert unbuilt.frozen["model.layers.2.attention.query_key_value.weight"] == (40 * 128, 4096)


def test_a_part_of_each_head_rotates_as_config_json_says_it():
    bare = {key: value for key, value in FLASH.items() if key != "partial_rotary_factor"}
    for hf, share in ((FLASH, 0.5), (bare, 1.0), (bare | {"rotary_dim": 64}, 0.5)):
        assert bailing_moe_v2.gpt_arguments(hf)["rotary_percent"] == share


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("score_function", "softmax"),
        ("moe_router_enable_expert_bias", False),
        ("moe_shared_expert_intermediate_size", 2048),
        ("router_dtype", "bf16"),
        ("router_type", "MultiRouter"),
        ("use_bias", True),
        ("use_qkv_bias", True),
        ("use_qk_norm", False),
        ("use_rmsnorm", False),
        ("partial_rotary_factor", 0.25),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("norm_topk_prob", False),
        ("num_experts_per_tok", 4),
        ("tie_word_embeddings", True),
    ],
)
def test_an_unsupported_model_is_refused_by_its_setting(tmp_path: Path, field: str, value: Any):
    with refused("model.unsupported", about=field):
        read(tmp_path, FLASH | {"rotary_dim": 64, field: value})


def test_an_output_layer_of_normed_columns_is_refused(tmp_path: Path):
    with refused("model.field_unread", about="norm_head"):
        read(tmp_path, FLASH | {"norm_head": True})


@pytest.mark.parametrize("key", ["moe_router_enable_expert_bias", "router_dtype", "use_qk_norm"])
def test_an_engine_is_refused_a_file_that_it_would_misread(key: str):
    with refused("model.served_field", about=key):
        bailing_moe_v2.engine_table({name: value for name, value in FLASH.items() if name != key})


def test_an_engine_must_trust_the_code_that_the_checkpoint_brings(tmp_path: Path):
    with refused("publish.engine_argument", about="rollout.engines.sglang.trust_remote_code"):
        publication_plan(run(tmp_path, {}), read(tmp_path, SMALL), Sizes(), "cuda")


@pytest.mark.parametrize("encoding", ["hf", "local"])
def test_routers_are_published_in_fp32_and_matrices_in_fp8(tmp_path: Path, encoding: str):
    config = run(tmp_path, {"trust_remote_code": True}, publish={"encoding": encoding, "quantize": "triton"})
    plan = publication_plan(config, read(tmp_path, SMALL), Sizes(tensor=2), "cuda").plan
    sent = {tensor.name: tensor.dtype for buckets in plan.buckets for bucket in buckets for tensor in bucket.tensors}
    layer = {name.removeprefix("model.layers.1."): dtype for name, dtype in sent.items() if "layers.1." in name}
    experts = "mlp.experts.w13_weight" if encoding == "local" else "mlp.experts.7.up_proj.weight"
    assert {layer["mlp.gate.weight"], layer["mlp.gate.expert_bias"]} == {"float32"}
    for name in ("attention.query_key_value.weight", "attention.dense.weight", experts):
        assert layer[name] == "float8_e4m3fn"
    assert layer["attention.query_layernorm.weight"] == sent["model.word_embeddings.weight"] == "bfloat16"


def load_rank(path: str, rank: int, tensor: int, expert: int, out: str) -> dict[str, str]:
    """Writes what one rank of SGLang's model holds of the checkpoint in `path` to the file `out`; returns those
    parameters that slimx's account does not explain."""
    from slimx.adapters.sglang.weights.layout import hf_layout

    model = built(join(path, rank, tensor, ep_size=expert, trust_remote_code=True))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.load_weights(load_file(Path(path) / "model.safetensors").items())
    save_file({name: parameter.data for name, parameter in model.named_parameters()}, out)
    return hf_layout(model).uncovered


def test_sglangs_model_loads_the_checkpoint_as_the_table_says(tmp_path: Path):
    """On ranks of tensor and expert parallel engines, every parameter after `load_weights`."""
    torch.manual_seed(0)
    sizes = {"num_nextn_predict_layers": 0, "num_hidden_layers": 2, "vocab_size": 100}
    model = Ling(TINY | sizes)
    scatter(model)
    weights = write(model, tmp_path / "model")
    table = read_model(tmp_path / "model").engine_table()
    file = tmp_path / "rank.safetensors"
    for tensor, expert, rank in ENGINES:
        assert call_with_sglang(load_rank, str(tmp_path / "model"), rank, tensor, expert, str(file)) == {}
        layout = EngineLayout(table, EngineSizes(tensor=tensor, expert=expert))
        loaded, expected = load_file(file), rank_local(layout, weights, rank)
        assert loaded.keys() == expected.keys()
        assert [key for key, value in expected.items() if not torch.equal(loaded[key], value)] == []
