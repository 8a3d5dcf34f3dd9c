"""Exact mode: log-probs of the real server and of the real trainer are equal to the last bit, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = pytest.mark.integration


def test_quickstart_runs_in_exact_mode_without_any_gap(tiny_model: Path, task_of_sums: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        numerics={"mode": "exact"},
        # The pass over the old policy, which an exact run leaves out.
        algorithm={"old_logprobs": "recompute"},
        schedule={"steps": 3, "step_deadline": 120},
        checkpoint={"export_hf": False},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2, 3]
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["gap/max"] == 0.0 and row["mismatch/max"] == 0.0
        assert row["optim/grad_norm"] > 0 and row["publish/engines_verified"] == 1
