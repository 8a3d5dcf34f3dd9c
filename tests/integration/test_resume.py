"""Kill a run at any moment and start it again: it continues as the uninterrupted run would have."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.integration.recorded import STEPS, losses, recorded_tokens, recording_config
from tests.integration.runs import TrainProcess, completed_steps, steps

pytestmark = pytest.mark.integration


def assert_bitwise_equal(uninterrupted: Path, directory: Path) -> None:
    """Both runs have the same tokens and, to the last bit, the same losses."""
    whole, resumed = losses(uninterrupted / "run"), losses(directory / "run")
    assert whole.keys() == resumed.keys() == {*range(1, STEPS + 1)}
    for step in whole:
        assert resumed[step] == whole[step], step
    assert recorded_tokens(directory) == recorded_tokens(uninterrupted)


@pytest.mark.slow("two whole runs")
def test_a_killed_run_with_one_request_at_a_time_has_the_same_losses(uninterrupted, tiny_model, task_of_sums, tmp_path):
    directory = tmp_path / "killed"
    config = recording_config(directory, tiny_model, task_of_sums)
    at = random.randint(2, STEPS - 1)
    print(f"killed after step {at}")
    first = TrainProcess(config)
    first.until(lambda: completed_steps(directory / "run") >= at)
    first.kill()
    first.wait()
    first.assert_nothing_left()
    second = TrainProcess(config)
    assert second.wait() == 0, second.text()
    assert "resumed at step" in second.text()
    second.assert_nothing_left()
    assert_bitwise_equal(uninterrupted, directory)


def killed_while_it_saves(run: TrainProcess, directory: Path) -> None:
    """Kill the driver of `run` while it saves its second checkpoint: the first is the newest."""
    checkpoints = directory / "run" / "checkpoints"
    run.until((checkpoints / "iter_0000004.partial").exists)
    run.kill(signal.SIGKILL)
    run.wait()
    run.assert_nothing_left()
    assert [path.name for path in checkpoints.glob("iter_???????")] == ["iter_0000002"]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"


def resumed_at(step: int, config: Path) -> None:
    """The same command goes on after `step` and ends."""
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    assert f"resumed at step {step}" in run.text()
    run.assert_nothing_left()


def test_a_run_killed_during_a_save_has_the_same_losses(uninterrupted, tiny_model, task_of_sums, tmp_path):
    """`test_run.py` kills a trainer."""
    directory = tmp_path / "killed"
    config = recording_config(directory, tiny_model, task_of_sums)
    killed_while_it_saves(TrainProcess(config), directory)
    resumed_at(2, config)
    assert_bitwise_equal(uninterrupted, directory)


@pytest.mark.slow("two whole runs")
def test_a_run_killed_during_a_save_resumes_with_the_same_tokens(
    uninterrupted, tiny_model, task_of_sums, tmp_path, workers
):
    directory = tmp_path / "killed"
    config = recording_config(directory, tiny_model, task_of_sums, concurrency=64, workers=workers)
    killed_while_it_saves(TrainProcess(config), directory)
    resumed_at(2, config)
    whole, resumed = steps(uninterrupted / "run"), steps(directory / "run")
    assert recorded_tokens(directory) == recorded_tokens(uninterrupted)
    for step in whole:
        for key in ("value/loss", "reward/mean"):
            assert abs(resumed[step][key] - whole[step][key]) <= 1e-4, (step, key)
