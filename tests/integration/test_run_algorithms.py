"""Whole runs of algorithms whose steps have other parts than GRPO's: pairs from a file, penalties in every token's
reward with tokens selected, and a user's own advantages and loss."""

from __future__ import annotations

import json
import math

import pytest

from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = pytest.mark.integration


def test_preferences_from_a_file_are_learned_without_engines(tiny_model, task_of_sums, tmp_path):
    """The chosen answer is right, the rejected one is one more. The first margin is 0, its loss ln 2."""
    pairs = tmp_path / "pairs.jsonl"
    with pairs.open("w") as file:
        for line in (task_of_sums / "train.jsonl").read_text().splitlines()[:16]:
            prompt = json.loads(line)
            prompt["metadata"] = {"rejected": str(int(prompt["answer"]) + 1)}
            file.write(json.dumps(prompt) + "\n")
    config = write_config(
        tmp_path,
        tiny_model,
        pairs,
        trainer={"world_size": 2, "expert": 1, "pipeline": 2},
        rollout={
            "prompts": str(pairs),
            "prompts_per_step": 16,
            "engines": [],
            "generate": "slimx.rollout.preferences.generate",
            "sampling": {},
        },
        reward={"function": None},
        algorithm={"name": "dpo", "dpo_beta": 0.5},
        schedule={"steps": 6},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert rows[1]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5) and rows[1]["dpo/groups_without_pair"] == 0
    assert [rows[step]["dpo/loss"] for step in range(1, 7)] == sorted(
        (rows[step]["dpo/loss"] for step in range(1, 7)), reverse=True
    )
    assert rows[6]["dpo/loss"] < 0.6 and rows[6]["dpo/accuracy"] == 1.0 and rows[6]["dpo/margin"] > 0


@pytest.mark.slow
def test_penalised_rewards_and_selected_tokens_in_a_run(tiny_model, task_of_sums, tmp_path):
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        algorithm={
            "name": "reinforce_pp_baseline",
            "loss": "kl_cov",
            "cov_share": 0.2,
            "reference": True,
            "kl_reward_coef": 0.05,
        },
        schedule={"steps": 3, "updates_per_step": 2},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert abs(rows[1]["kl/reward"]) <= 1e-5 < abs(rows[3]["kl/reward"])
    for row in rows.values():
        assert row["optim/grad_norm"] > 0 and row["advantage/std"] > 0
        assert 0.1 < row["covariance/selected"] <= 0.2 and row["loss/clip_fraction"] > 0


@pytest.mark.slow
def test_own_advantages_and_an_own_loss_in_a_run(tiny_model, task_of_sums, tmp_path):
    hooks = "tests.integration.hooks"
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        algorithm={"advantages": f"{hooks}.own_advantages", "loss": f"{hooks}.own_loss"},
        schedule={"steps": 2},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert all(row["loss/own"] > 0 and row["optim/grad_norm"] > 0 for row in rows.values())
