"""Fixtures of the tests in this room: a configuration in which nothing is wrong, and the command that takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from slimx.extras.quickstart.make_model import make_model
from tests.unit.config.command_stand import PROMPT, Command


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    make_model(out, seed=1)
    return out


@pytest.fixture
def file(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration in which nothing is wrong; `run` fails the test if it starts anything."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps(PROMPT) + "\n")
    config = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model)},
        "numerics": {"dtype": "float32"},
        "rollout": {
            "prompts": str(tmp_path / "prompts.jsonl"),
            "max_prompt_tokens": 64,
            "sampling": {"max_new_tokens": 4},
            "engines": [{"name": "actor", "threads": 1}],
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run.yaml"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)
