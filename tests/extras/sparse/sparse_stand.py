"""Configurations of models with sparse attention, for the tests of this directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from slimx.models.families import ModelSpec, read_model
from tests.published import published

V32, GLM_5 = published("DeepSeek-V3.2"), published("GLM-5")
INDEXER = "self_attn.indexer."


def read(directory: Path, hf: dict[str, Any], **how: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(hf))
    return read_model(directory, **how)


def small(hf: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns a model of five layers with four experts."""
    return {**hf, "num_hidden_layers": 5, "n_routed_experts": 16, "num_nextn_predict_layers": 0, **fields}


def run(directory: Path, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(directory)},
            "model": {"path": str(directory)},
            "numerics": {"dtype": "bfloat16"},
            "rollout": {"prompts": "p", "engines": [{"name": "actor"}]},
            **sections,
        }
    )
