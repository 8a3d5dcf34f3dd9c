"""Helpers of the tests of conversions: small checkpoints, a conversion that is checked, and the content of a
directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slimx.extras.convert import work
from slimx.extras.convert.work import convert
from tests.checkpoint_stand import QWEN3_MOE

LAYOUT = "tensor=2,pipeline=2,expert=4,expert_tensor=1"
WIDE: dict[str, Any] = QWEN3_MOE | {
    "hidden_size": 136,
    "moe_intermediate_size": 128,
    "head_dim": 128,
    "num_experts": 2,
    "num_hidden_layers": 1,
}
"""Rows in whole blocks of 128, columns that end inside one."""
QWEN3: dict[str, Any] = {
    key: value for key, value in QWEN3_MOE.items() if not any(part in key for part in ("expert", "moe", "topk"))
} | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "tie_word_embeddings": True,
}
"""A dense model, its output layer tied to the embedding."""


def go(conversion: work.Conversion, out: Path) -> Path:
    """Convert with every check."""
    convert(conversion, out, threads=2, verify=True)
    return out


def content(directory: Path) -> dict[str, bytes]:
    """Every file below `directory`."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def change(source: Path, **changed: torch.Tensor | None) -> Path:
    """Put tensors into a Hugging Face directory, in their own dtype, or take them out of it (None); names with dots are
    given by `change(source, **{"a.b": ...})`."""
    index = source / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    for name, tensor in changed.items():
        file = where.get(name, next(iter(where.values())))
        tensors = load_file(source / file)
        tensors.pop(name, None)
        where.pop(name, None)
        if tensor is not None:
            tensors[name], where[name] = tensor, file
        save_file(tensors, source / file, metadata={"format": "pt"})
    index.write_text(json.dumps({"weight_map": where}))
    return source


def fields(directory: Path, **changed: Any) -> Path:
    """Change fields of config.json; None takes one out."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changed
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory


def dtypes_of(directory: Path) -> dict[str, str]:
    """Dtype of every tensor by the headers of safetensors files."""
    out = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            out |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return out
