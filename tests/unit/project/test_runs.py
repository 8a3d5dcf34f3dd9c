"""Whole runs of tests/integration: reading what they are writing, and ending them after a failure."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.conftest import pytest_runtest_call
from tests.integration.runs import TrainProcess, completed_steps, written


def test_a_line_that_a_run_is_writing_is_not_read_yet(tmp_path: Path) -> None:
    assert completed_steps(tmp_path) == 0
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert written(file) == [{"step": 1}, {"step": 2}] and completed_steps(tmp_path) == 2


def test_runs_of_a_test_that_fails_end_and_earlier_ones_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    earlier, current = (
        SimpleNamespace(kill=lambda signum, name=name: ended.append((name, signum))) for name in ("earlier", "own")
    )
    monkeypatch.setattr(TrainProcess, "started", [earlier])
    call = pytest_runtest_call()
    next(call)
    TrainProcess.started.append(current)
    with pytest.raises(AssertionError):
        call.throw(AssertionError())
    assert ended == [("own", signal.SIGTERM)]
