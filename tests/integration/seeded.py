"""Checkpoints of seeded models that engines can serve."""

from __future__ import annotations

import json
import runpy
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.integration.conftest import ROOT, perturbed

QUICKSTART = ROOT / "slimx/extras/quickstart/make_model.py"


def write_seeded(hf: dict[str, Any], out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes a model of the configuration `hf` with the quickstart's tokenizer; no tensor is constant, so that none can
    hide."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(1)
    fields = deepcopy(hf)  # transformers changes some that are nested
    config = AutoConfig.for_model(**{key: value for key, value in fields.items() if key != "torch_dtype"})
    kind = AutoModelForImageTextToText if "vision_config" in hf else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(out)
    weights = perturbed(load_file(out / "model.safetensors"), 2)
    save_file({name: w.to(dtype) for name, w in weights.items()}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(hf))
    write_tokenizer(out)


def write_tokenizer(out: Path) -> None:
    runpy.run_path(str(QUICKSTART))["make_tokenizer"]().save_pretrained(out)
