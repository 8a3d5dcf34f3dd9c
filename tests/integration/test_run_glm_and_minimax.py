"""Whole runs of GLM-4.5, MiniMax-M2, Ling-2, Qwen3-Next and Qwen3.5: trainers and engines of two ranks, which route
alike and agree after every publication; in bfloat16 engines of MiniMax-M2 hold the routers in fp32."""

from __future__ import annotations

import pytest

from slimx.models.families import read_model
from tests.integration.engine_families import make_model
from tests.integration.family_oracle import read
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow("a whole run of each family")]


BIASED = ("e_score_correction_bias", "q_norm", "k_norm", "q_proj.weight")
DELTA_NET = ("A_log", "dt_bias", "conv1d", "attn.norm", "shared_expert_gate")
PARTS = {
    "glm4_moe": BIASED,
    "minimax_m2": BIASED,
    "bailing_moe_v2": ("expert_bias", "query_layernorm", "key_layernorm", "query_key_value"),
    "qwen3_next": (*DELTA_NET, "in_proj_qkvz", "in_proj_ba"),
    "qwen3_5_moe": (*DELTA_NET, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "qwen3_5_moe_published": (*DELTA_NET, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}
"""Parts of the names of tensors that training moves, besides those that all have."""


@pytest.mark.parametrize(
    ("name", "dtype", "encoding"),
    [
        ("glm4_moe", "float32", "auto"),
        ("minimax_m2", "bfloat16", "hf"),
        ("bailing_moe_v2", "float32", "auto"),
        ("qwen3_next", "float32", "auto"),
        ("qwen3_5_moe", "float32", "auto"),
        ("qwen3_5_moe_published", "float32", "auto"),
        ("qwen3_5_moe_published", "bfloat16", "hf"),
    ],
)
def test_two_trainer_ranks_and_two_engine_ranks_agree(task_of_sums, tmp_path, name, dtype, encoding):
    model = tmp_path / "model"
    make_model(name, model)
    moe = {} if name.startswith("qwen3_") else {"bias_update_rate": 0.05}
    engine = {"name": "actor", "max_total_tokens": 4096, "tensor": 2, "expert": 2}
    config = write_config(
        tmp_path,
        model,
        task_of_sums / "train.jsonl",
        numerics={"dtype": dtype},
        trainer={"tensor": 2, "expert": 2, "expert_tensor": 1, "moe": moe},
        rollout={
            "prompts": str(task_of_sums / "train.jsonl"),
            "engines": [{**engine, "sglang": dict(read_model(model).engine_arguments)}],
        },
        publish={"encoding": encoding},
        schedule={"steps": 2},
        checkpoint={"export_hf": True},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2]
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["optim/grad_norm"] > 0 and row["publish/engines_verified"] == 1
        assert row["gap/max"] <= (1e-4 if dtype == "float32" else 0.5)
    before, exported = read(model), read(tmp_path / "run" / "hf")
    assert exported.keys() == before.keys()
    moved = {key for key, tensor in exported.items() if not tensor.equal(before[key].to(tensor.dtype))}
    last = ".experts.down_proj" if name.endswith("published") else ".experts.7."
    for part in (*PARTS[name], "gate.weight", last):
        assert any(part in key for key in moved), part
    assert not [key for key in moved if "visual" in key]
