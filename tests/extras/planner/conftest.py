"""Fixtures of the tests in this room: the command that plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras.planner.planning_stand import Planning


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Planning:
    return Planning(tmp_path, capsys, monkeypatch)
