"""Writes the model, prompts and configuration of the soak's run, the smallest with every kind of process."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import yaml

TOOLS = Path(__file__).parents[1]
HELD_OUT = 4
"""Number of prompts of an evaluation."""


def write_task(out: Path, steps: int, *, transport: str, every: int) -> Path:
    """Writes model, prompts and configuration into `out`, unless they exist; returns the configuration file. `every`:
    steps between two checkpoints; evaluations are rarer by a factor of 2 and exports by 20."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        runpy.run_path(str(TOOLS / "quickstart/make_model.py"))["make_model"](out / "model", seed=1)
        runpy.run_path(str(TOOLS / "quickstart/make_task.py"))["make_task"](out / "task", seed=1)
        lines = (out / "task/heldout.jsonl").read_text().splitlines(keepends=True)
        (out / "task/few.jsonl").write_text("".join(lines[:HELD_OUT]))
    file = out / "config.yaml"
    file.write_text(yaml.safe_dump(configuration(out, steps, transport=transport, every=every)))
    return file


def configuration(out: Path, steps: int, *, transport: str, every: int) -> dict[str, Any]:
    """Returns the run's configuration."""
    return {
        "run": {"name": "soak", "dir": str(out / "run")},
        "model": {"path": str(out / "model")},
        "numerics": {"dtype": "float32"},
        "cluster": {"start_deadline": 900, "ray_deadline": 60, "stop_deadline": 120},
        "trainer": {"world_size": 1, "expert": 1, "optimizer": {"lr": 1e-4}, "watch_deadline": 60},
        "rollout": {
            "prompts": str(out / "task/train.jsonl"),
            "prompts_per_step": 2,
            "group_size": 2,
            "max_prompt_tokens": 64,
            "engines": [{"name": "actor", "max_total_tokens": 4096}],
            "sampling": {"max_new_tokens": 2},
            "filter": "tools.soak.hooks.keep",
            "max_failed_share": 1.0,
            "gap_probe": 1,
            "health": {"interval": 2, "timeout": 20, "restarts": 1000},
        },
        "reward": {"function": "tools.soak.hooks.digits", "isolation": "process", "workers": 1, "deadline": 60},
        "schedule": {"steps": steps, "max_staleness": 1, "step_deadline": 900},
        "publish": {"transport": transport},
        "checkpoint": {"every": every, "keep": 2, "export_every": 20 * every},
        "eval": {"prompts": str(out / "task/few.jsonl"), "every": 2 * every},
        # Every step's groups stay: they say which prompts were trained.
        "track": {"report": False, "tensorboard": False, "samples_every": 1000, "rollouts": {"keep": 0}},
    }


def last_step(run: Path) -> int:
    """Returns the newest step in metrics.jsonl, 0 before the first. Reads only the end of the file."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 65536))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue  # it is being written, or its beginning was cut off
    return 0
