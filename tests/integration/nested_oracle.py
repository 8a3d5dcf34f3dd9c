"""Tiny models that transformers knows under another name: a Kimi-K2.5 around its DeepSeek-V3, a MiMo-7B around its
Qwen2. Their checkpoints are written as published ones look, with the tensors that no trainer holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slimx.models.families import read_model
from tests.integration import deepseek_v3_oracle, family_oracle
from tests.integration.conftest import Weights

VISION = {
    "vt_hidden_size": 24,
    "vt_intermediate_size": 40,
    "vt_num_hidden_layers": 2,
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 24,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 6,
}


def write_config(path: Path, fields: dict[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps(fields))


def write_with_frozen(path: Path, weights: Weights) -> None:
    """Writes `weights` and random tensors for all that the model's table carries over."""
    carried = {name: torch.randn(shape) for name, shape in read_model(path).table.frozen.items()}
    assert carried
    save_file(weights | carried, path / "model.safetensors", metadata={"format": "pt"})


class KimiK25(deepseek_v3_oracle.Oracle):
    """A Moonlight as the text of a Kimi-K2.5."""

    def __init__(self, path: Path, seed: int):
        super().__init__(path, seed, deepseek_v3_oracle.MODELS["Moonlight"])
        text = json.loads((path / "config.json").read_text())
        outside = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
        write_config(path, {**outside, "text_config": text, "vision_config": VISION, "tie_word_embeddings": False})
        self.weights = self._named(self.weights)
        write_with_frozen(path, self.weights)

    def _gradients(self) -> Weights:
        return self._named(super()._gradients())

    @staticmethod
    def _named(tensors: Weights) -> Weights:
        return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


class MiMo(family_oracle.Oracle):
    """A Qwen2 with an additional layer of multi-token prediction."""

    def __init__(self, path: Path, seed: int, fields: dict[str, Any]):
        super().__init__(path, family_oracle.stock_model(path, seed, "Qwen2Config", fields))
        config = json.loads((path / "config.json").read_text())
        named = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
        write_config(path, config | named | {"num_nextn_predict_layers": 1})
        write_with_frozen(path, self.weights)
