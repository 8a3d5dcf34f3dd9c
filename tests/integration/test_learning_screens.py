"""The example of screens learns in three stages with two seeds: the format of actions, single actions, whole tasks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from examples.screens.make import make_model, make_task
from tests.integration.conftest import ROOT
from tests.integration.runs import TrainProcess, steps

pytestmark = [pytest.mark.integration, pytest.mark.slow("fifteen minutes of whole runs")]
EXAMPLE = ROOT / "examples" / "screens"
PROMPTS = {"sft": "demonstrations", "actions": "actions", "tasks": "tasks"}
"""Prompt files by stage, in order."""


def learned(tmp_path: Path, stage: str, seed: int, load: str | None) -> list[dict[str, Any]]:
    """Trains a stage from the export of the stage `load`, and returns the metrics of its evaluations, first to last."""
    data = tmp_path / "data"
    more = () if load is None else (f"trainer.load={tmp_path / load}/hf", f"eval.prompts={data}/heldout-{stage}.jsonl")
    run = TrainProcess(
        Path(shutil.copy(EXAMPLE / f"{stage}.yaml", tmp_path)),
        f"run.dir={tmp_path / stage}",
        f"run.seed={seed}",
        f"model.path={data}/model",
        f"rollout.prompts={data / PROMPTS[stage]}.jsonl",
        *more,
    )
    assert run.wait(3600) == 0, run.text()
    rows = steps(tmp_path / stage)
    assert max((row["gap/max"] for row in rows.values() if "gap/max" in row), default=0.0) <= 1e-4
    return [rows[step] for step in sorted(rows) if "eval/accuracy" in rows[step]]


@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_an_agent_learns_to_use_a_drawn_phone(tmp_path: Path, seed: int) -> None:
    make_model(tmp_path / "data" / "model", seed)
    make_task(tmp_path / "data", seed)
    assert learned(tmp_path, "sft", seed, None) == []
    actions = learned(tmp_path, "actions", seed, "sft")
    tasks = learned(tmp_path, "tasks", seed, "actions")
    print(f"seed {seed}: {json.dumps([[row['eval/accuracy'] for row in rows] for rows in (actions, tasks)])}")
    assert actions[0]["eval_hook/format/mean"] >= 0.95
    for rows, before, after in ((actions, 0.45, 0.45), (tasks, 0.7, 0.85)):
        accuracy = [row["eval/accuracy"] for row in rows]
        assert accuracy[0] <= before and accuracy[-1] >= after and accuracy[-1] > accuracy[0] + 0.1
