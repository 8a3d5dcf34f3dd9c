"""A run of two steps, as the commands that show runs read it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from slimx.config.schema import Config
from slimx.data.saved.step_files import DIRECTORY, StepFiles, origin_of
from slimx.data.saved.trained_tokens import TrainedTokens
from tests.extras.watch.page_stand import MARKUP, group, row
from tests.unit.rollout.rollout_stand import config_of, the_tokenizer


def write_run(tmp_path: Path) -> Path:
    """Writes a run and its model into `tmp_path`, and returns the run's directory."""
    directory, model = tmp_path / "run", tmp_path / "model"
    the_tokenizer().save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"hidden_size": 8, "vocab_size": 100, "dtype": "float32"}))
    config: Config = config_of()
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    files = StepFiles(directory / DIRECTORY, origin_of(config, the_tokenizer()), every=1, keep=0, resume_step=0)
    files.write(1, 1, [group(0, [0.0, 1.0], text=MARKUP, dataset="sums")], {})
    files.write(
        2, 2, [group(1, [1.0, 0.0], text="2+2=", dataset="sums"), group(2, [1.0], text="3+1=", dataset="math")], {}
    )
    logprobs = np.array([np.nan, -2.0, -0.1, -2.5, -4.0, -0.5], np.float32)
    experts = np.array([False, False, False, True, False, False])
    files.write_trained(
        2,
        [
            TrainedTokens(logprobs=logprobs, advantages=np.full(6, advantage, np.float32), other_experts=experts)
            for advantage in (1.0, -1.0, 0.5)
        ],
    )
    (directory / "config.yaml").write_text(config.to_text())
    (directory / "metrics.jsonl").write_text(row(1, 0.25) + row(2, 0.5) + '{"step": 3, "met')
    phases = [{"name": "train", "step": 1, "track": "main", "start": 1e9, "seconds": 2.0}] * 2
    (directory / "timeline.jsonl").write_text("".join(json.dumps(item) + "\n" for item in phases))
    (directory / "lock").touch()
    return directory
