"""Which family a Hugging Face directory belongs to, and what slimx needs to know of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slimx.errors import SlimxError
from slimx.layout.table import Table
from slimx.models import qwen3_moe

FAMILIES: dict[str, ModuleType] = {qwen3_moe.ARCHITECTURE: qwen3_moe}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as read from config.json, before any tensor is touched."""

    path: str
    hf: dict[str, Any]
    transformer: dict[str, Any]
    """Fields of megatron-core's TransformerConfig."""
    gpt: dict[str, Any]
    """Arguments of megatron-core's GPTModel."""
    table: Table

    @property
    def vocab_size(self) -> int:
        return self.hf["vocab_size"]

    @property
    def experts(self) -> int:
        return self.table.experts


def read_model(path: str | Path) -> ModelSpec:
    """Read `path`/config.json. Raises SlimxError for a missing directory, an unknown family or an unsupported field."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise SlimxError(f"{path}: no checkpoint there (config.json is missing); give a Hugging Face model directory")
    try:
        hf = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SlimxError(f"{file}: not valid JSON ({error}); restore the file from the checkpoint's source") from error
    names = hf.get("architectures") or ["nothing"]
    family = FAMILIES.get(names[0])
    if family is None:
        raise SlimxError(f"{file}: architecture {names[0]} is not supported; slimx knows {', '.join(sorted(FAMILIES))}")
    try:
        problem = family.unsupported(hf)
        if problem:
            raise SlimxError(f"{file}: {names[0]} with {problem} is not supported")
        return ModelSpec(
            str(path), hf, family.transformer_config(hf), family.gpt_arguments(hf), family.weight_table(hf)
        )
    except KeyError as error:
        raise SlimxError(f"{file}: field {error} is missing; a {names[0]} checkpoint must have it") from error
