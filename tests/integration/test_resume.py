"""Kill a run at any moment and start it again: it continues as the uninterrupted run would have."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.integration.recorded import LOSS, STEPS, recorded_tokens, recording_config
from tests.integration.runs import TrainProcess, completed_steps, steps

pytestmark = pytest.mark.integration


def assert_bitwise_equal(uninterrupted: Path, directory: Path) -> None:
    """Both runs have the same tokens and, to the last bit, the same losses."""
    whole, resumed = steps(uninterrupted / "run"), steps(directory / "run")
    assert whole.keys() == resumed.keys() == {*range(1, STEPS + 1)}
    for step in whole:
        assert [resumed[step][key] for key in LOSS] == [whole[step][key] for key in LOSS], step
    assert recorded_tokens(directory) == recorded_tokens(uninterrupted)
    assert all(
        row["gap/tokens"] and row["gap/mean"] <= 1e-5 and not row["gap/tokens_unexplained"] for row in whole.values()
    )


@pytest.mark.slow
def test_one_request_at_a_time_a_killed_and_resumed_run_has_bitwise_the_same_losses(
    uninterrupted, tiny_model, task_of_sums, tmp_path
):
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


def killed_while_it_saves(directory: Path, config: Path) -> None:
    """A run that is killed while it saves, and started again."""
    first = TrainProcess(config)
    checkpoints = directory / "run" / "checkpoints"
    first.until(lambda: (checkpoints / "iter_0000004.partial").exists())
    first.kill(signal.SIGKILL)
    first.wait()
    first.assert_nothing_left()
    assert [path.name for path in checkpoints.glob("iter_???????")] == ["iter_0000002"]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"
    second = TrainProcess(config)
    assert second.wait() == 0, second.text()
    assert "resumed at step 2" in second.text()
    second.assert_nothing_left()


def test_killed_while_it_saves_a_run_resumes_with_bitwise_the_same_losses(
    uninterrupted, tiny_model, task_of_sums, tmp_path
):
    directory = tmp_path / "killed"
    killed_while_it_saves(directory, recording_config(directory, tiny_model, task_of_sums))
    assert_bitwise_equal(uninterrupted, directory)


@pytest.mark.slow
def test_killed_while_it_saves_a_run_at_normal_concurrency_resumes_with_the_same_tokens(
    uninterrupted, tiny_model, task_of_sums, tmp_path
):
    directory = tmp_path / "killed"
    killed_while_it_saves(directory, recording_config(directory, tiny_model, task_of_sums, concurrency=64))
    whole, resumed = steps(uninterrupted / "run"), steps(directory / "run")
    assert recorded_tokens(directory) == recorded_tokens(uninterrupted)
    for step in whole:
        for key in ("loss/policy", "reward/mean"):
            assert abs(resumed[step][key] - whole[step][key]) <= 1e-4, (step, key)
