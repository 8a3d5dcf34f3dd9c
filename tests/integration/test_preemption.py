"""Stops at inconvenient moments: while the first batch is generated, and where trainers and engines take turns."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.integration.recorded import ROWS, recorded, recorded_tokens, recording_config
from tests.integration.runs import TrainProcess, steps
from tests.refusals import numbers

pytestmark = [pytest.mark.integration, pytest.mark.slow("four whole runs")]


@pytest.mark.parametrize("colocate", [False, True])
def test_a_preempted_run_keeps_complete_groups_and_continues(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path, colocate: bool
):
    directory = tmp_path / "d"
    schedule = {"steps": 2, "colocate": colocate}
    config = recording_config(directory, tiny_model, task_of_sums, hold=ROWS // 2, schedule=schedule)
    first = TrainProcess(config, "checkpoint.grace=300")
    first.until(lambda: len(recorded(directory)) == ROWS // 2)
    time.sleep(1)  # its reward too
    first.kill(signal.SIGUSR1 if colocate else signal.SIGTERM)
    assert first.wait() == 75, first.text()
    first.assert_nothing_left()
    messages = [line for line in first.text().splitlines() if line.startswith("slimx: ")]
    assert numbers(messages[-1]) == [0, 2], "the step that is saved, and all"
    (directory / "go").touch()
    second = TrainProcess(config)
    assert second.wait() == 0, second.text()
    second.assert_nothing_left()
    assert "resumed at step 0" in second.text() and steps(directory / "run").keys() == {1, 2}
    assert len(recorded_tokens(directory)) == len(recorded(directory)) == 2 * ROWS, "no complete group is made again"
