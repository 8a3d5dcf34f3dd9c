"""examples/quickstart.py trains: a script's own function is the reward, of a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slimx.extras.quickstart.make_task import make_task
from tests.integration.conftest import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow("a whole run"), pytest.mark.timeout(3600)]


def test_the_script_trains_with_its_reward(tiny_model: Path, tmp_path: Path) -> None:
    make_task(tmp_path)
    overrides = [
        *(
            f"run.dir={tmp_path}/run",
            f"model.path={tiny_model}",
            "trainer.load=null",
            f"eval.prompts={tmp_path}/heldout.jsonl",
        ),
        *(
            "trainer.world_size=1",
            "trainer.expert=1",
            f"rollout.prompts={tmp_path}/train.jsonl",
            "rollout.prompts_per_step=4",
        ),
        *(
            "schedule.steps=1",
            "eval.every=0",
            "algorithm.reference=false",
            "track.report=false",
            "reward.isolation=process",
        ),
    ]
    command = [sys.executable, "examples/quickstart.py", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 1 and 0 <= rows[-1]["metrics"]["reward/mean"] <= 1
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["reward"]["function"] == "__main__.reward"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
