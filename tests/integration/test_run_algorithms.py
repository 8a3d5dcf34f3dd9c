"""Whole runs of algorithms whose steps have other parts than GRPO's: penalties in every token's reward with tokens
selected, and a user's own advantages and loss. `test_run_checkpoints.py` has pairs from a file."""

from __future__ import annotations

import pytest

from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = [pytest.mark.integration, pytest.mark.slow("two whole runs")]


def test_penalized_rewards_and_selected_tokens_in_a_run(tiny_model, task_of_sums, tmp_path):
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        algorithm={
            "name": "reinforce_pp_baseline",
            "loss": {"kind": "kl_cov", "share": 0.2},
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


def test_a_run_trains_with_custom_advantages_and_a_custom_loss(tiny_model, task_of_sums, tmp_path):
    hooks = "tests.integration.hooks"
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        algorithm={"advantages": f"{hooks}.rewards_as_advantages", "loss": f"{hooks}.weighted_loss"},
        schedule={"steps": 2},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert all(row["loss/own"] > 0 and row["optim/grad_norm"] > 0 for row in rows.values())
