"""A run of a model whose family slimx does not bring: every process finds the module that the configuration names."""

from __future__ import annotations

import json

import pytest

from tests.integration.engine_families import make_model
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow("a whole run")]


def test_trainers_build_the_family_that_the_configuration_names(tmp_path):
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    make_model("mixtral", model)
    lines = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(8)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = write_config(
        tmp_path,
        model,
        prompts,
        rollout={"engines": [], "generate": "demonstrations", "group_size": 1},
        reward={"function": None},
        algorithm={"name": "sft"},
        schedule={"steps": 2},
    )
    run = TrainProcess(config, "model.family=examples.mixtral")
    assert run.wait() == 0, run.text()
    assert all(row["optim/grad_norm"] > 0 for row in steps(tmp_path / "run").values())
