"""Tiny vision-language models of transformers, their checkpoints written as published ones look."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from slimx.data.records import Image, Span, Trajectory
from slimx.extras.vision.images.store import ImageStore
from tests.integration.conftest import Weights
from tests.integration.family_oracle import Fill, Oracle

KIMI_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
KIMI_TOWER = {
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "video_attn_type": "spatial_temporal",
}
KIMI_PROCESSOR = {
    "auto_map": {
        "AutoProcessor": "kimi_k25_processor.KimiK25Processor",
        "AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor",
    },
    "media_proc_cfg": {
        "in_patch_limit": 16384,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
    },
}
"""preprocessor_config.json as published, whose code slimx does not run."""
TOKENS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
PROCESSORS = {
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen2VLImageProcessorFast", "Qwen3VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLVideoProcessor"),
    "glm4v_moe": ("Glm4vProcessor", "Glm4vImageProcessorFast", "Glm4vVideoProcessor"),
}
"""Model type -> classes of its processor, and of those of its images and videos."""
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<kind>gate|up|down)_proj\.weight")


IMAGES = "images"
"""Directory of prepared images in that of the checkpoint."""
SHOWN = {0: (("a", 2),), 1: (("b", 4), ("a", 6)), 2: (("c", 1),), 5: (("a", 3), ("a", 3)), 9: (("b", 2),)}
"""Index of a demonstration -> its images, each with the index of the text token that it precedes."""
GRIDS = {"a": (1, 4, 6), "b": (1, 2, 2), "c": (1, 8, 2)}


class VisionOracle(Oracle):
    """A model of transformers with a vision tower. Its experts, if any, are stacked in the checkpoint.

    With `with_images`, some of the demonstrations show images."""

    with_images = False

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
        publish(path)
        super().__init__(path, model)

    def trajectories(self) -> list[Trajectory]:
        plain = [without_special(trajectory) for trajectory in super().trajectories()]
        if not self.with_images:
            return plain
        random = np.random.default_rng(5)
        shape = self._patch(self.model.config.vision_config.patch_size)
        self.pixels = {
            name: random.standard_normal((np.prod(grid), *shape), np.float32) for name, grid in GRIDS.items()
        }
        for name, pixels in self.pixels.items():
            ImageStore(self.path / IMAGES).save(name, pixels, GRIDS[name])
        shown = [showing(trajectory, SHOWN.get(index, ())) for index, trajectory in enumerate(plain)]
        self.images = {tuple(trajectory.token_ids[:-1].tolist()): trajectory.images for trajectory in shown}
        return shown

    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        images = self.images[tuple(tokens.tolist())] if self.with_images else []
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        options: dict[str, torch.Tensor] = {}
        if images:
            options["pixel_values"] = torch.from_numpy(np.concatenate([self.pixels[image.digest] for image in images]))
            options["image_grid_thw"] = torch.tensor([image.grid for image in images])
        return self.model(ids, **self._options(ids), **options).logits[0]

    def _patch(self, size: int) -> tuple[int, ...]:
        """Returns the shape of a patch in which the tower takes it, of two frames of an image."""
        return (3 * 2 * size**2,)

    def _options(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns what the model takes in addition to tokens and images."""
        return {"mm_token_type_ids": (ids == TOKENS["image_token_id"]).int()}

    def _gradients(self) -> Weights:
        return published(super()._gradients(), self.path)


class WithImages(VisionOracle):
    with_images = True


class KimiK25(WithImages):
    """A model whose images have the positions of text."""

    def __init__(
        self, path: Path, seed: int, config: str, text: dict[str, Any], vision: dict[str, Any], fill: Fill
    ) -> None:
        super().__init__(path, seed, config, text, vision, fill, projection_hidden_size=vision["hidden_size"])

    def _patch(self, size: int) -> tuple[int, ...]:
        return (3, size, size)

    def _options(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


def without_special(trajectory: Trajectory) -> Trajectory:
    """Returns the demonstration without tokens that would announce an image."""
    trajectory.token_ids = np.where(trajectory.token_ids >= 120, trajectory.token_ids - 100, trajectory.token_ids)
    return trajectory


def showing(trajectory: Trajectory, images: tuple[tuple[str, int], ...]) -> Trajectory:
    """Returns the demonstration with images inserted, each with its placeholders between two tokens."""
    for name, before in images:
        count = int(np.prod(GRIDS[name])) // 4
        start = before + sum(image.stop - image.start + 2 for image in trajectory.images)
        middle = [TOKENS["image_token_id"]] * count
        inserted = [TOKENS["vision_start_token_id"], *middle, TOKENS["vision_end_token_id"]]
        images_now = [*trajectory.images, Image(start=start + 1, stop=start + 1 + count, grid=GRIDS[name], digest=name)]
        length = len(trajectory.token_ids) + len(inserted)
        trajectory = replace(
            trajectory,
            token_ids=np.insert(trajectory.token_ids, start, inserted).astype(np.int32),
            loss_mask=np.insert(trajectory.loss_mask, start, [0] * len(inserted)),
            logprobs=np.full(length, np.nan, np.float32),
            spans=[Span(start=0, stop=length, source="inserted")],
            images=images_now,
        )
    return trajectory


def write_processor(hf: dict[str, Any], directory: Path) -> None:
    """Writes the configurations of the image and video processors that belong to config.json `hf`."""
    vision = hf["vision_config"]
    if hf["model_type"] == "kimi_k25":
        (directory / "preprocessor_config.json").write_text(json.dumps(KIMI_PROCESSOR))
        return
    patch = vision["patch_size"]
    area = (patch * vision["spatial_merge_size"]) ** 2
    processor, image, video = PROCESSORS.get(hf["model_type"], PROCESSORS["qwen3_vl"])
    fields = {
        "processor_class": processor,
        "patch_size": patch,
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "size": {"shortest_edge": 4 * area, "longest_edge": 64 * area},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    for name, kind in (
        ("preprocessor_config", {"image_processor_type": image}),
        ("video_preprocessor_config", {"video_processor_type": video}),
    ):
        (directory / f"{name}.json").write_text(json.dumps({**fields, **kind}))


def publish(directory: Path) -> None:
    """Rewrites the checkpoint in `directory` as published ones store experts: in one tensor for the gate and up
    projections of a layer, and one for the down projections; Qwen3-VL's are transposed, GLM-4.5V's are not stacked.
    Rewrites config.json of Qwen2.5-VL, whose published files have no `text_config`, and of Kimi-K2.5, whose published
    files have other names."""
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] == "qwen2_5_vl" and "text_config" in config:
        (directory / "config.json").write_text(json.dumps(flat(config)))
    if config["model_type"] == "kimi_k25" and "media_placeholder_token_id" not in config:
        (directory / "config.json").write_text(json.dumps(with_published_names(config)))
    file = directory / "model.safetensors"
    save_file(published(load_file(file), directory), file, metadata={"format": "pt"})


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json of a Qwen2.5-VL as it is published."""
    text = dict(config["text_config"])
    rotary = text.pop("rope_parameters")
    rest = {name: value for name, value in config.items() if name != "text_config"}
    scaling = {"type": "mrope", "mrope_section": rotary["mrope_section"]}
    return {**text, **rest, "rope_theta": rotary["rope_theta"], "rope_scaling": scaling}


def with_published_names(config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json of a Kimi-K2.5 as it is published. It also has the fields that transformers and SGLang read
    instead, whose defaults are the published values."""
    vision = config["vision_config"]
    text = config["text_config"]
    sizes = {name: vision[name] for name in KIMI_SIZES}
    axes = {f"pos_emb_{axis}": vision[f"pos_emb_{axis}"] for axis in ("height", "width", "time")}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": config["image_token_id"],
        "image_token_id": config["image_token_id"],
        "tie_word_embeddings": False,
        "text_config": {**text, "architectures": ["DeepseekV3ForCausalLM"]},
        "vision_config": {
            **KIMI_TOWER,
            **{name: vision[name] for name in ("patch_size", "merge_kernel_size")},
            **{f"vt_{name}": size for name, size in sizes.items()},
            **sizes,
            **{f"init_{name}": size for name, size in axes.items()},
            **axes,
            "mm_hidden_size": sizes["hidden_size"],
            "text_hidden_size": text["hidden_size"],
        },
        "projection_hidden_size": sizes["hidden_size"],
    }


def published(weights: Weights, directory: Path) -> Weights:
    """Returns `weights`, as transformers writes those of the model in `directory`, in the form of published
    checkpoints."""
    config = (directory / "config.json").read_text()
    if "Glm4vMoe" in config:
        return weights
    if "KimiK25" in config:
        return {corrected(name): tensor for name, tensor in weights.items()}
    out = stacked(weights)
    if "Qwen3VLMoe" in config:
        for name in out:
            if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                out[name] = out[name].transpose(1, 2).contiguous()
    return out


def corrected(name: str) -> str:
    """Returns the published name of a tensor of Kimi-K2.5. transformers 5.19 writes some names that it does not read:
    it reverses each of its renamings for all tensors."""
    for written, name_published in (
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
        ("model.mm_projector.", "mm_projector."),
    ):
        name = name.replace(written, name_published)
    return name


def stacked(weights: Weights) -> Weights:
    """Returns `weights` with the tensors of single experts stacked."""
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
