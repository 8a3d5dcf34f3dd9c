"""Whole runs: one step off, colocated, two turns; and how a run ends when it is told to, or when a part of it dies."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.runs import TrainProcess, completed_steps, saved_tickets, steps, write_config
from tests.integration.test_resume import task  # noqa: F401

pytestmark = pytest.mark.integration


def _rollout(task: Path, **changes: object) -> dict[str, object]:  # noqa: F811
    return {"prompts": str(task / "train.jsonl"), **changes}


def test_one_step_off_trains_groups_at_most_one_version_old_and_still_measures_the_gap(tiny_model, task, tmp_path):  # noqa: F811
    config = write_config(
        tmp_path,
        tiny_model,
        task / "train.jsonl",
        schedule={"steps": 4, "max_staleness": 1},
        rollout=_rollout(task, generate="examples.two_turn.generate"),
        algorithm={"reference": True, "kl_coef": 0.01},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    rows = steps(tmp_path / "run")
    assert [rows[step]["staleness/max"] for step in sorted(rows)] == [0, 1, 1, 1]
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["gap/mean"] <= 1e-5 and row["gap/tokens_unexplained"] == 0
        assert row["kl/reference"] >= 0
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert len(saved_tickets(checkpoint)) == 4  # the batch that was in flight is kept


def test_colocated_engines_sleep_while_trainers_train_and_serve_the_next_step(tiny_model, task, tmp_path):  # noqa: F811
    config = write_config(
        tmp_path, tiny_model, task / "train.jsonl", schedule={"steps": 2, "colocate": True}, rollout=_rollout(task)
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    for row in steps(tmp_path / "run").values():
        assert row["time/sleep"] > 0 and row["time/wake"] > 0 and row["gap/mean"] <= 1e-5


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_and_says_so(signum, code, tiny_model, task, tmp_path):  # noqa: F811
    config = write_config(tmp_path, tiny_model, task / "train.jsonl", schedule={"steps": 1000}, rollout=_rollout(task))
    run = TrainProcess(config)
    run.until(lambda: completed_steps(tmp_path / "run") >= 1)
    run.kill(signum)
    assert run.wait(60) == code, run.text()
    assert run.text().rstrip().endswith(f"slimx: stopped by {signal.Signals(signum).name}")
    run.assert_nothing_left()


def test_a_server_that_dies_ends_the_run_with_the_end_of_its_log(tiny_model, task, tmp_path):  # noqa: F811
    config = write_config(
        tmp_path,
        tiny_model,
        task / "train.jsonl",
        schedule={"steps": 1000},
        rollout=_rollout(task, health={"interval": 0.5, "timeout": 10, "threshold": 3}),
    )
    run = TrainProcess(config)
    run.until(lambda: completed_steps(tmp_path / "run") >= 1)
    scheduler = [p for p in run.processes() if "sglang::scheduler" in " ".join(p.cmdline())]
    assert len(scheduler) == 1
    scheduler[0].kill()
    assert run.wait(90) == 2, run.text()
    assert "slimx: engine actor-0 ended with status" in run.text()
    assert "engine-actor-0.log" in run.text()
    assert "Traceback" not in run.text()
    run.assert_nothing_left()
    assert not [
        p for p in psutil.process_iter(["status"]) if p.info["status"] == psutil.STATUS_ZOMBIE and p.ppid() == 1
    ]
