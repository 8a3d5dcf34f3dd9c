"""`slimx status` tells how far a run is, whether it runs, and what its engines do, from its directory alone."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path

import pytest
import yaml

from slimx import cli
from slimx.observability.status import run_status

ENGINE = {"name": "actor-0", "role": "regular", "frozen": False, "nodes": 2, "url": "http://h:1", "restarts": 1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run": {"name": "r"}, "schedule": {"steps": 9}}))
    rows = [{"step": step, "metrics": {"reward/mean": step / 10, "gap/mean": None}} for step in range(4)]
    # The last line is being written.
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "met')
    (tmp_path / "timeline.jsonl").write_text(json.dumps({"name": "train"}) + "\n")
    (tmp_path / "engines.json").write_text(json.dumps({"engines": [ENGINE | {"standing": "member"}]}))
    (tmp_path / "lock").touch()
    return tmp_path


def status(directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["slimx", "status", str(directory)])
    try:
        cli.main()
    except SystemExit as error:
        assert error.code in (0, 2)
    out = capsys.readouterr()
    return out.out + out.err


def test_a_run_that_trains_is_told_with_its_engines(run, monkeypatch, capsys):
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = status(run, monkeypatch, capsys)
    assert "r: running, step 3 of 9, written 0 s ago, last phase train" in text and "reward/mean 0.3\n" in text
    assert "actor-0 (regular): member at http://h:1, 2 machines, started again 1 times" in text


def test_a_run_that_ended_has_no_engines(run, monkeypatch, capsys):
    text = status(run, monkeypatch, capsys)
    assert "not running, step 3 of 9" in text and "actor" not in text


def test_a_run_that_has_written_nothing_yet_is_at_step_0(run):
    for name in ("metrics.jsonl", "timeline.jsonl", "engines.json", "lock"):
        (run / name).unlink()
    found = run_status(run)
    assert (found["step"], found["running"], found["engines"], found["seconds_ago"]) == (0, False, [], None)


def test_a_directory_without_a_run_is_refused(tmp_path, monkeypatch, capsys):
    assert status(tmp_path, monkeypatch, capsys).startswith(f"slimx: {tmp_path} holds no run")
