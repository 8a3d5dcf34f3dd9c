"""Whole PPO runs: a critic in the trainers' ranks, and one in its own. `test_resume.py` kills the first and has it back
bit for bit."""

from __future__ import annotations

import math

import pytest

from tests.integration.recorded import CRITIC, PPO
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = pytest.mark.integration


def test_the_critic_warms_up_and_learns_and_the_reference_is_refreshed(uninterrupted):
    rows = steps(uninterrupted / "run")
    # The first step warms the critic up: the policy is measured, not trained.
    assert "loss/policy" not in rows[1] and "optim/grad_norm" not in rows[1] and rows[1]["gap/tokens"] > 0
    assert rows[2]["kl/reward"] == pytest.approx(0, abs=1e-5), "the policy of step 2 must still be the reference"
    # From the third step on the reference is what the second one trained.
    assert rows[3]["kl/reward"] == pytest.approx(0, abs=1e-5)
    assert rows[4]["optim/grad_norm"] > 0 and abs(rows[4]["kl/reward"]) > 1e-6
    for row in rows.values():
        assert row["value/loss"] > 0 and row["critic/grad_norm"] > 0
        assert row["gap/mean"] <= 1e-5 and row["gap/tokens"] > 0 and row["gap/tokens_unexplained"] == 0
        assert 0.9 < row["mismatch/ess"] <= 1 + 1e-9 and row["mismatch/max"] >= row["mismatch/mean"] > 0
    # A zero head says 0 everywhere: every return is its reward, and nothing is explained.
    assert rows[1]["value/explained_variance"] == pytest.approx(0, abs=1e-9)
    assert rows[1]["return/mean"] == pytest.approx(rows[1]["advantage/mean"])
    assert rows[4]["value/mean"] > 0.05


@pytest.mark.slow("a second whole run")
def test_a_critic_in_separate_ranks_trains_at_the_same_time(tiny_model, task_of_sums, tmp_path):
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        rollout={"prompts": str(task_of_sums / "train.jsonl"), "sampling": {"max_new_tokens": 6}},
        algorithm=PPO,
        trainer={"world_size": 1, "expert": 1, "deadline": 120, "optimizer": {"lr": 1e-3}},
        critic={**CRITIC, "placement": "own", "layout": {"world_size": 2, "pipeline": 2}},
        schedule={"steps": 4, "updates_per_step": 2},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    directory = tmp_path / "run"
    rows = steps(directory)
    assert all(row["value/loss"] > 0 and math.isfinite(row["critic/grad_norm"]) for row in rows.values())
    assert rows[3]["optim/grad_norm"] > 0
    assert (directory / "logs" / "critic-1.log").exists()
    assert (directory / "checkpoints" / "iter_0000004" / "critic" / ".metadata").is_file()
