"""Configurations of tiny vision-language models, and of runs with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from slimx.models.families import ModelSpec, configured_model, read_model
from tests.integration.engine_families import MODELS

FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5_published", "qwen3_5_moe_published")


def write(directory: Path, hf: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(hf))
    return directory


def changed(name: str, *path: str, value: object) -> dict[str, Any]:
    """Returns config.json of the model `name` with another value at `path`; None removes the field."""
    hf: dict[str, Any] = json.loads(json.dumps(MODELS[name]))
    *outer, last = path
    inner = hf
    for key in outer:
        inner = inner[key]
    if value is None:
        inner.pop(last, None)
    else:
        inner[last] = value
    return hf


def run(directory: Path, name: str = "qwen3_vl", **sections: Any) -> Config:
    """Returns a run with images of the model `name`, whose config.json is written to `directory`."""
    trainer = {"vision": {}, **sections.pop("trainer", {})}
    fields = {
        "run": {"dir": str(directory / "run")},
        "model": {"path": str(write(directory, MODELS[name]))},
        "trainer": trainer,
        "rollout": {"prompts": "p", "engines": [{"name": "actor"}]},
    }
    return Config.model_validate({**fields, **sections})


def read(directory: Path, hf: dict[str, Any]) -> ModelSpec:
    return read_model(write(directory, hf))


def seeing(config: Config) -> ModelSpec:
    return configured_model(config)
