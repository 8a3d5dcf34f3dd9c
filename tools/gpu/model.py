"""The Qwen3-MoE of the loop on one GPU: random weights, a character tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slimx.extras.quickstart.make_model import CONFIG, make_tokenizer
from slimx.models.families import read_model


@dataclass(frozen=True)
class Size:
    """The sizes of the model that differ between devices."""

    layers: int
    hidden: int
    heads: int
    head_dim: int
    experts: int
    expert_hidden: int
    vocabulary: int

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return max(1, self.heads // 2)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of config.json that follow from the sizes."""
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": self.expert_hidden,
            "intermediate_size": 4 * self.expert_hidden,
            "vocab_size": self.vocabulary,
        }


GPU = Size(layers=8, hidden=512, heads=8, head_dim=128, experts=16, expert_hidden=256, vocabulary=32768)
"""About 96 million parameters. Heads and experts are sizes for which SGLang has kernels."""
CPU = Size(layers=2, hidden=64, heads=4, head_dim=16, experts=8, expert_hidden=32, vocabulary=128)


def write_model(path: Path, size: Size, dtype: torch.dtype) -> int:
    """Writes a checkpoint of random weights into the new directory `path`; returns the number of parameters."""
    path.mkdir(parents=True)
    name = str(dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(CONFIG | size.fields() | {"torch_dtype": name}, indent=2))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for tensor, shape in read_model(path).table.checkpoint_shapes().items():
        norm = len(shape) == 1
        # Far from uniform: a gap between trainer and engine would not show in flat distributions.
        scale = 0.05 if norm else 1.5 / shape[-1] ** 0.5
        tensors[tensor] = (torch.randn(shape, generator=generator) * scale + norm).to(dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save_pretrained(path)
    return sum(tensor.numel() for tensor in tensors.values())
