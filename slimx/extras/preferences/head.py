"""The score head of a reward model in a Hugging Face directory, in the layout of transformers' sequence classification:
one label, `score.weight` [1, hidden], no bias, the score of the last token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from slimx.models.families import SCORE

POLICY = "ForCausalLM"
"""Suffix of a policy's architecture."""
CLASSIFIER = "ForSequenceClassification"
"""Suffix of a reward model's architecture."""


def write_score(path: Path, weight: np.ndarray) -> list[str]:
    """Writes the head `weight` [1, hidden] as a safetensors file; returns the names of its tensors."""
    save_file({SCORE: torch.from_numpy(weight.copy())}, path, metadata={"format": "pt"})
    return [SCORE]


def declare_score(directory: Path) -> None:
    """Changes a policy's config.json in `directory` to that of a reward model."""
    file = directory / "config.json"
    fields = json.loads(file.read_text())
    architectures = [name.replace(POLICY, CLASSIFIER) for name in fields.get("architectures") or ()]
    fields |= {"architectures": architectures, "num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
    file.write_text(json.dumps(fields, indent=2) + "\n")
