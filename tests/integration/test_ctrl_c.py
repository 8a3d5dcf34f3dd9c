"""Ctrl-C at moments of a start: one line, status 130, and nothing is left."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.integration.runs import TrainProcess, write_config

pytestmark = pytest.mark.integration
END_S = 100
"""Seconds for an end that takes up to 9 on a quiet machine."""


# Imports of the command line, of the run, checks, Ray, trainers and engines, on a quiet machine.
@pytest.mark.parametrize(
    "moments",
    [(0.3, 2.0, 6.0), pytest.param((0.0, 0.8, 4.5, 9.0), marks=pytest.mark.slow("more moments"))],
    ids=len,
)
def test_ctrl_c_ends_a_start_in_one_line(
    moments: tuple[float, ...], tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, tiny_model, task_of_sums / "train.jsonl")
    for seconds in moments:
        run = TrainProcess(config, program=(sys.executable, "-m", "slimx"))
        maps = Path(f"/proc/{run.process.pid}/maps")
        run.until(lambda maps=maps: "pydantic_core" in maps.read_text())  # its imports have begun
        time.sleep(seconds)
        run.kill(signal.SIGINT)
        # Python ends by the signal itself where one has passed through code that C ran; a shell makes 130 of both.
        assert run.wait(END_S) in (128 + signal.SIGINT, -signal.SIGINT), run.text()
        messages = [line for line in run.text().splitlines() if line.startswith("slimx: ")]
        assert len(messages) == 1 and "Traceback" not in run.text(), run.text()
        run.assert_nothing_left()
