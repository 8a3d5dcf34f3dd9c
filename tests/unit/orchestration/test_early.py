"""Refusals that come before torch is imported, and leave no run directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from slimx import cli
from slimx.errors import SlimxError
try:
    cli.app(standalone_mode=False)
except SlimxError as error:
    print(error.code, "torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    make = [sys.executable, "tools/quickstart/make_model.py", "--out", str(out)]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    return out


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("model.path=/nosuch", "model.directory"),
        ("rollout.prompts=/nosuch.jsonl", "prompts.unreadable"),
        ("reward.function=nosuch.reward", "dotted.import"),
        ("cluster.ray_address=127.0.0.1:1", "cluster.unreachable"),
        ("run.name=shadowed", "environment.shadowed"),
    ],
)
def test_a_refusal_that_needs_no_model_comes_before_torch(
    model: Path, tmp_path: Path, override: str, code: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "1"}], "answer": "1"}\n')
    run = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model)},
        "rollout": {"prompts": str(tmp_path / "prompts.jsonl")},
        "reward": {"function": "slimx.rewards.exact.reward"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    environment = dict(os.environ)
    if code == "environment.shadowed":
        (tmp_path / "shadow").mkdir()
        (tmp_path / "shadow" / "torch.py").write_text("")
        environment["PYTHONPATH"] = str(tmp_path / "shadow")
    command = [sys.executable, "-c", PROGRAM, "train", str(tmp_path / "run.yaml"), override]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [code, "False"], done.stdout + done.stderr
    assert not (tmp_path / "run").exists()
