"""Adapters that the package peft makes for a model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import peft


def make_adapters(base: Path, out: Path, **config: Any) -> peft.PeftModel:
    """Writes adapters of `base` with random A and B to `out`, as `peft.LoraConfig(**config)` has them.

    Returns the model with them, in float32."""
    import peft

    torch.manual_seed(3)
    model = peft.get_peft_model(load_model(base), peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(out)
    return model


def load_model(path: Path) -> Any:
    """Returns the model in directory `path` by transformers, in float32, with its vision tower if it has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = "vision_config" in json.loads((path / "config.json").read_text())
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32)


def logprobs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Returns [L, vocabulary] after each of `ids` [L]."""
    with torch.no_grad():
        return model(ids[None]).logits[0].log_softmax(-1)
