"""A whole run of a dense model with tied embeddings: there are no routes to ask engines for, and none are missed."""

from __future__ import annotations

import pytest
import torch

from tests.integration.engine_families import make_model
from tests.integration.family_oracle import read
from tests.integration.runs import TrainProcess, steps, write_config
from tests.integration.test_resume import task  # noqa: F401

pytestmark = pytest.mark.integration


def test_two_trainer_ranks_and_an_engine_agree_after_every_publication(task, tmp_path):  # noqa: F811
    model = tmp_path / "model"
    make_model("qwen2", model)
    config = write_config(
        tmp_path,
        model,
        task / "train.jsonl",
        trainer={"world_size": 2, "tensor": 2, "expert": 1},
        schedule={"steps": 2, "step_deadline": 120},
        checkpoint={"export_hf": True},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2]
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["gap/max"] <= 1e-4 and row["gap/tokens_unexplained"] == 0
        assert row["optim/grad_norm"] > 0 and row["publish/engines_verified"] == 1
    before, exported = read(model), read(tmp_path / "run" / "hf")
    assert exported.keys() == before.keys() and "lm_head.weight" not in exported
    moved = {name for name, tensor in exported.items() if not torch.equal(tensor, before[name])}
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.bias"} <= moved
