"""Whole PPO runs: a critic in the trainers' ranks that is killed and comes back bit for bit, and one in its own."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from tests.integration.recorded import UNCHECKED
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = pytest.mark.integration

PPO = {"name": "ppo", "gae_lambda": 0.95, "reference": True, "kl_reward_coef": 0.05, "reference_refresh": 2}
CRITIC = {"optimizer": {"lr": 5e-3}, "warmup_steps": 1}
REPEATED = (
    "loss/policy",
    "optim/grad_norm",
    "value/loss",
    "value/explained_variance",
    "critic/grad_norm",
    "advantage/std",
    "kl/reward",
    "reward/mean",
)


def ppo_config(directory: Path, model: Path, task_of_sums: Path, **sections: dict) -> Path:
    directory.mkdir()
    rollout = {
        "prompts": str(task_of_sums / "train.jsonl"),
        "concurrency": 1,
        "sampling": {"max_new_tokens": 6},
        "health": UNCHECKED,
    }
    return write_config(
        directory,
        model,
        task_of_sums / "train.jsonl",
        **{"rollout": rollout, "algorithm": PPO, "critic": CRITIC, "schedule": {"steps": 4}, **sections},
    )


def test_a_ppo_run_learns_values_and_resumes_bit_for_bit(tiny_model, task_of_sums, tmp_path):
    config = ppo_config(tmp_path / "whole", tiny_model, task_of_sums, checkpoint={"every": 2})
    whole = TrainProcess(config)
    assert whole.wait() == 0, whole.text()
    whole.assert_nothing_left()
    rows = steps(tmp_path / "whole" / "run")
    # The first step warms the critic up: the policy is measured, not trained.
    assert "loss/policy" not in rows[1] and "optim/grad_norm" not in rows[1] and rows[1]["gap/tokens"] > 0
    assert rows[2]["kl/reward"] == pytest.approx(0, abs=1e-5), "the policy of step 2 must still be the reference"
    # From the third step on the reference is what the second one trained, also in the resumed run.
    assert rows[4]["optim/grad_norm"] > 0 and abs(rows[4]["kl/reward"]) > 1e-6
    assert rows[3]["kl/reward"] == pytest.approx(0, abs=1e-5)
    for row in rows.values():
        assert row["value/loss"] > 0 and row["critic/grad_norm"] > 0 and row["gap/mean"] <= 1e-5
        assert 0.9 < row["mismatch/ess"] <= 1 + 1e-9 and row["mismatch/max"] >= row["mismatch/mean"] > 0
    # A zero head says 0 everywhere: every return is its reward, and nothing is explained.
    assert rows[1]["value/explained_variance"] == pytest.approx(0, abs=1e-9)
    assert rows[1]["return/mean"] == pytest.approx(rows[1]["advantage/mean"])
    assert rows[4]["value/mean"] > 0.05

    # What a run has left behind that was killed after its second step's checkpoint.
    shutil.copytree(tmp_path / "whole" / "run", tmp_path / "killed" / "run")
    shutil.rmtree(tmp_path / "killed" / "run" / "checkpoints" / "iter_0000004")
    resumed = ppo_config_in(tmp_path / "killed", config)
    again = TrainProcess(resumed)
    assert again.wait() == 0, again.text()
    assert "resumed at step 2" in again.text()
    found = steps(tmp_path / "killed" / "run")
    for step in (3, 4):
        assert [found[step][key] for key in REPEATED] == [rows[step][key] for key in REPEATED], step


def ppo_config_in(directory: Path, config: Path) -> Path:
    """`config` for a run in another directory."""
    file = directory / "config.yaml"
    file.write_text(config.read_text().replace(str(config.parent / "run"), str(directory / "run")))
    return file


@pytest.mark.slow
def test_a_critic_in_ranks_of_its_own_with_another_layout_trains_beside_the_policy(tiny_model, task_of_sums, tmp_path):
    config = ppo_config(
        tmp_path / "own",
        tiny_model,
        task_of_sums,
        trainer={"world_size": 1, "expert": 1, "deadline": 120, "optimizer": {"lr": 1e-3}},
        critic={**CRITIC, "placement": "own", "layout": {"world_size": 2, "pipeline": 2}},
        schedule={"steps": 4, "updates_per_step": 2},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    directory = tmp_path / "own" / "run"
    rows = steps(directory)
    assert all(row["value/loss"] > 0 and math.isfinite(row["critic/grad_norm"]) for row in rows.values())
    assert rows[3]["optim/grad_norm"] > 0
    assert (directory / "logs" / "critic-1.log").exists()
    assert (directory / "checkpoints" / "iter_0000004" / "critic" / ".metadata").is_file()
