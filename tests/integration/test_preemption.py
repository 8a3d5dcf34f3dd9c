"""SIGUSR1 at inconvenient moments: while the first batch is generated, and where trainers and engines take turns."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.integration.launching import recorded_tokens, recording_config
from tests.integration.runs import TrainProcess, steps
from tests.integration.test_resume import task  # noqa: F401

pytestmark = [pytest.mark.integration, pytest.mark.slow]
LONG = {"max_new_tokens": 100, "stop_token_ids": [20]}


def _generating(directory: Path, groups: int) -> bool:
    """Whether that many trajectories are complete."""
    file = directory / "tokens.jsonl"
    return file.exists() and len(file.read_text().splitlines()) >= groups


@pytest.mark.parametrize("colocate", [False, True])
def test_a_run_that_is_told_to_leave_while_it_generates_keeps_complete_groups_and_goes_on(
    tiny_model: Path,
    task: Path,  # noqa: F811
    tmp_path: Path,
    colocate: bool,
):
    directory = tmp_path / "d"
    config = recording_config(directory, tiny_model, task, schedule={"steps": 2, "colocate": colocate})
    more = [f"rollout.sampling.{key}={value}" for key, value in LONG.items()]
    first = TrainProcess(config, *more)
    first.until(lambda: _generating(directory, 4))
    first.kill(signal.SIGUSR1)
    assert first.wait(60) == 75, first.text()
    first.assert_nothing_left()
    assert "stopped by SIGUSR1: step 0 of 2 is saved" in first.text()
    assert (directory / "run/checkpoints/iter_0000000").is_dir()
    before = {json.loads(line)["id"] for line in (directory / "tokens.jsonl").open()}
    second = TrainProcess(config, *more)
    assert second.wait() == 0, second.text()
    second.assert_nothing_left()
    assert "resumed at step 0" in second.text() and steps(directory / "run").keys() == {1, 2}
    written = [json.loads(line)["id"] for line in (directory / "tokens.jsonl").open()]
    # Groups of two trajectories: those that were complete were not generated again, and what was is the same.
    assert len(recorded_tokens(directory)) == 16 and len(written) - 16 < len(before)
