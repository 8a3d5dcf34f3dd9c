"""Training again on what a run has saved: bitwise the same without engines, and on another layout from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from slimx.data.saved.step_files import step_files
from tests.integration.recorded import LOSS, STEPS, VALUE
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = pytest.mark.integration

VARYING = ("time/", "perf/", "memory/", "publish/", "engines/", "rollout/")
"""Metrics of the engines, and those that differ between two runs of the same."""


def replaying(uninterrupted: Path, directory: Path, *overrides: str) -> TrainProcess:
    """Starts the uninterrupted run's configuration, trained again in `directory` on what it has saved."""
    file = directory / "config.yaml"
    file.write_text((uninterrupted / "config.yaml").read_text())
    return TrainProcess(file, f"run.dir={directory / 'run'}", f"rollout.replay={uninterrupted / 'run'}", *overrides)


def assert_same_metrics(recorded: Path, replayed: Path, expected: range, among: tuple[str, ...]) -> None:
    """Asserts that all metrics that do not depend on engines or time, `among` others, are the same to the last bit."""
    whole, again = steps(recorded / "run"), steps(replayed / "run")
    assert [*whole] == [*again] == [*expected]
    for step, row in whole.items():
        compared = {key: value for key, value in row.items() if not key.startswith(VARYING)}
        assert {key: again[step].get(key) for key in compared} == compared, step
    assert set(among) <= compared.keys()


def test_a_replay_has_bitwise_the_metrics_of_the_run_that_saved_it(uninterrupted, tmp_path):
    run = replaying(uninterrupted, tmp_path)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    assert json.loads((tmp_path / "run" / "engines.json").read_text())["engines"] == []
    assert_same_metrics(uninterrupted, tmp_path, range(1, STEPS + 1), (*LOSS, *VALUE))
    assert not list((tmp_path / "run" / "logs").glob("engine*")) and not step_files(tmp_path / "run" / "rollouts")


@pytest.mark.slow("two whole runs")
def test_a_replay_that_is_resumed_has_them_too(uninterrupted, tmp_path):
    first = replaying(uninterrupted, tmp_path, "schedule.steps=3")
    assert first.wait() == 0, first.text()
    second = replaying(uninterrupted, tmp_path)
    assert second.wait() == 0, second.text()
    assert "resumed at step 3" in second.text()
    assert_same_metrics(uninterrupted, tmp_path, range(1, STEPS + 1), (*LOSS, *VALUE))


ROUTED = {"moe": {"routing_replay": "R3"}}
CASES = {
    "experts of each token, two updates": {"trainer": ROUTED, "schedule": {"steps": 3, "updates_per_step": 2}},
    "experts of each token, two updates, a critic": {
        "trainer": ROUTED,
        "schedule": {"steps": 3, "updates_per_step": 2},
        "algorithm": {"name": "ppo", "advantages": {"lam": 0.95}, "reference": True, "kl_reward_coef": 0.05},
        "critic": {"optimizer": {"lr": 5e-3}, "warmup_steps": 1},
    },
    "old log-probs of the trainers, partial rollouts of two versions": {
        "schedule": {"steps": 4, "max_staleness": 1, "updates_per_step": 2},
        "rollout": {"partial": True, "sampling": {"max_new_tokens": 96, "top_p": 0.9}, "concurrency": 6},
        "algorithm": {"name": "decoupled_ppo"},
    },
}


@pytest.mark.slow("full grid: two whole runs a case")
@pytest.mark.parametrize("case", CASES)
def test_a_replay_has_bitwise_the_metrics_also_with(case, tiny_model, task_of_sums, tmp_path):
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    recorded.mkdir()
    replayed.mkdir()
    sections = CASES[case] | {"track": {"rollouts": {"routes": True}}}
    first = TrainProcess(write_config(recorded, tiny_model, task_of_sums / "train.jsonl", **sections))
    assert first.wait() == 0, first.text()
    second = replaying(recorded, replayed)
    assert second.wait() == 0, second.text()
    among = ("value/loss", "critic/grad_norm") if "critic" in sections else ("loss/policy",)
    assert_same_metrics(recorded, replayed, range(1, sections["schedule"]["steps"] + 1), (*among, "optim/grad_norm"))
    rows = steps(replayed / "run").values()
    assert all(row["routes/differing"] == 0 for row in rows) if "trainer" in sections else True
    if "partial" in sections.get("rollout", {}):
        assert any(row["staleness/mixed"] > 0 for row in rows), "two versions have sampled a trajectory"


@pytest.mark.slow("a whole run")
def test_the_last_steps_are_repeated_on_another_layout(uninterrupted, tmp_path):
    """`make test` has its parts: the replay above, other layouts that go on from a checkpoint with the same losses
    (test_checkpoints), a whole run that forks one (test_run_checkpoints)."""
    kept = sorted((uninterrupted / "run" / "checkpoints").glob("iter_???????"))
    assert [path.name for path in kept] == ["iter_0000002", "iter_0000004"]
    assert yaml.safe_load((uninterrupted / "config.yaml").read_text())["trainer"]["expert"] == 2
    process = replaying(uninterrupted, tmp_path, f"run.fork={kept[0]}", "trainer.tensor=2", "trainer.expert_tensor=1")
    assert process.wait() == 0, process.text()
    assert f"resumed at step 2 from {kept[0]}" in process.text()
    whole, again = steps(uninterrupted / "run"), steps(tmp_path / "run")
    assert again.keys() == {3, 4}
    for step, row in again.items():
        for key in LOSS:
            assert row[key] == pytest.approx(whole[step][key], rel=1e-3, abs=1e-6), (step, key)
        assert row["gap/mean"] <= 1e-5
