"""The example of pictures learns to read digits with two seeds: from a warm start that is greedily always wrong, the
accuracy on held-out images rises to at least 0.9, while trainers and engines agree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from examples.pictures.make import make_model, make_task
from tests.integration.conftest import ROOT
from tests.integration.runs import TrainProcess, steps

pytestmark = [pytest.mark.integration, pytest.mark.slow("ten minutes of whole runs")]
EXAMPLE = ROOT / "examples" / "pictures"
STEPS = 60


@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_vision_language_model_learns_to_read_digits(tmp_path: Path, seed: int) -> None:
    data = tmp_path / "data"
    make_model(data / "model", seed)
    make_task(data, seed)
    for name, prompts, more in (
        ("sft", "demonstrations.jsonl", ()),
        ("grpo", "train.jsonl", (f"trainer.load={tmp_path}/sft/hf", f"eval.prompts={data}/heldout.jsonl")),
    ):
        run = TrainProcess(
            Path(shutil.copy(EXAMPLE / f"{name}.yaml", tmp_path)),
            f"run.dir={tmp_path / name}",
            f"run.seed={seed}",
            f"model.path={data}/model",
            f"rollout.prompts={data / prompts}",
            *more,
        )
        assert run.wait(3600) == 0, run.text()
    rows = steps(tmp_path / "grpo")
    accuracy = {step: row["eval/accuracy"] for step, row in rows.items() if "eval/accuracy" in row}
    print(f"seed {seed}: {accuracy}")
    assert accuracy[0] <= 0.1 and accuracy[STEPS] >= 0.9
    assert max(row["gap/max"] for step, row in rows.items() if step) <= 1e-4
