"""Writes the score head of a reward model into a Hugging Face directory, in the format of transformers' sequence
classification: one label, `score.weight` [1, hidden], no bias. The score of an answer is the head's output at the last
token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from slimx.models.families import SCORE

POLICY = "ForCausalLM"
"""Suffix of the architecture's name in a policy's config.json."""
CLASSIFIER = "ForSequenceClassification"
"""Suffix of the architecture's name in a reward model's config.json."""


def write_score(path: Path, weight: np.ndarray) -> list[str]:
    """Writes the head's weight [1, hidden] to the safetensors file `path`, and returns the names of the tensors in that
    file."""
    save_file({SCORE: torch.from_numpy(weight.copy())}, path, metadata={"format": "pt"})
    return [SCORE]


def declare_score(directory: Path) -> None:
    """Changes config.json in `directory` from the configuration of a policy to that of a reward model."""
    file = directory / "config.json"
    fields = json.loads(file.read_text())
    architectures = [name.replace(POLICY, CLASSIFIER) for name in fields.get("architectures") or ()]
    fields |= {"architectures": architectures, "num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
    file.write_text(json.dumps(fields, indent=2) + "\n")
