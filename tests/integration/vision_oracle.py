"""Tiny vision-language models of transformers, their checkpoints written as published ones look."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.integration.conftest import Weights
from tests.integration.family_oracle import Fill, Oracle

QWEN3_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
TOKENS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<kind>gate|up|down)_proj\.weight")


class VisionOracle(Oracle):
    """A model of transformers with a vision tower. Its experts, if any, are stacked in the checkpoint."""

    def __init__(
        self,
        path: Path,
        seed: int,
        config: str,
        text: dict[str, Any],
        vision: dict[str, Any],
        fill: Fill,
        **fields: Any,
    ):
        """`config`: name of the configuration's class. `text`, `vision`, `fields`: fields of `text_config`, of
        `vision_config` and of the top level of config.json."""
        import transformers

        torch.manual_seed(seed)
        tied = text["tie_word_embeddings"]
        configuration = getattr(transformers, config)(
            text_config=text, vision_config=vision, tie_word_embeddings=tied, **TOKENS, **fields
        )
        model = transformers.AutoModelForImageTextToText.from_config(
            configuration, dtype=torch.float32, attn_implementation="eager"
        )
        fill(model)
        model.save_pretrained(path)
        stack_experts(path)
        super().__init__(path, model)

    def _gradients(self) -> Weights:
        return stacked(super()._gradients())


def write_processor(hf: dict[str, Any], directory: Path) -> None:
    """Writes the configurations of the image and video processors that belong to config.json `hf`."""
    vision = hf["vision_config"]
    patch = vision["patch_size"]
    area = (patch * vision["spatial_merge_size"]) ** 2
    fields = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": patch,
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "size": {"shortest_edge": 4 * area, "longest_edge": 64 * area},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    for name, kind in (
        ("preprocessor_config", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (directory / f"{name}.json").write_text(json.dumps({**fields, **kind}))


def stack_experts(directory: Path) -> None:
    """Rewrites the checkpoint in `directory` with one tensor for the gate and up projections of a layer's experts, and
    one for their down projections."""
    file = directory / "model.safetensors"
    save_file(stacked(load_file(file)), file, metadata={"format": "pt"})


def stacked(weights: Weights) -> Weights:
    """Returns `weights` with the tensors of single experts stacked as in published checkpoints."""
    out: Weights = {}
    parts: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            out[name] = tensor
        else:
            parts.setdefault(match["experts"], {})[match["kind"], int(match["index"])] = tensor
    for module, tensors in parts.items():
        indices = sorted(index for kind, index in tensors if kind == "down")
        both = [torch.cat([tensors["gate", index], tensors["up", index]]) for index in indices]
        out[f"{module}.gate_up_proj"] = torch.stack(both)
        out[f"{module}.down_proj"] = torch.stack([tensors["down", index] for index in indices])
    return out
