"""A tiny model that transformers knows under another name: a MiMo-7B around its Qwen2. Its checkpoint is written as
published ones look, with the tensors that no trainer holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slimx.models.families import read_model
from tests.integration import family_oracle
from tests.integration.conftest import Weights


def write_config(path: Path, fields: dict[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps(fields))


def write_with_frozen(path: Path, weights: Weights) -> None:
    """Writes `weights` and random tensors for all that the model's table carries over."""
    carried = {name: torch.randn(shape) for name, shape in read_model(path).table.frozen.items()}
    assert carried
    save_file(weights | carried, path / "model.safetensors", metadata={"format": "pt"})


class MiMo(family_oracle.Oracle):
    """A Qwen2 with an additional layer of multi-token prediction."""

    def __init__(self, path: Path, seed: int, fields: dict[str, Any]):
        super().__init__(path, family_oracle.stock_model(path, seed, "Qwen2Config", fields))
        config = json.loads((path / "config.json").read_text())
        named = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
        write_config(path, config | named | {"num_nextn_predict_layers": 1})
        write_with_frozen(path, self.weights)
