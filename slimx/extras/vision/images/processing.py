"""Prepares images in a separate process: decodes a file, and converts its pixels with the model's image processor."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np

from slimx.config.sections.trainer import Vision
from slimx.errors import SlimxError, one_line
from slimx.extras.vision.images.pictures import as_rgb, opened
from slimx.extras.vision.images.store import Grid, ImageStore
from slimx.runtime.process import end_with_parent

_PATCH_FIELDS = {
    "patch_size": "patch_size",
    "merge_size": "merge_kernel_size",
    "max_patches": "in_patch_limit",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
"""Attribute of transformers' processor of Kimi-K2.5 -> field of media_proc_cfg."""
_state: dict[str, Any] = {}
"""Image processor and store of this process."""


def begin(parent: int, model: str, directory: str, size: dict[str, int]) -> None:
    """Loads the image processor in the directory `model`. Called once in each process, whose parent is `parent`.
    `directory`: that of the image store. `size`: limits on numbers of pixels that differ from the processor's."""
    end_with_parent(parent, signal.SIGKILL)
    _state["processor"] = load_processor(model, size)
    _state["store"] = ImageStore(directory)


def limits(vision: Vision) -> dict[str, int]:
    """Returns the limits on numbers of pixels that `trainer.vision` sets, by the processor's names."""
    size = {"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels}
    return {name: pixels for name, pixels in size.items() if pixels is not None}


def load_processor(model: str, size: dict[str, int]) -> Any:
    """Returns the image processor in the directory `model`, with the limits `size`. Raises SlimxError if there is
    none."""
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(model, local_files_only=True)
    except Exception as error:  # a missing or damaged file, an unknown class
        raise SlimxError(
            f"{model}: the image processor cannot be loaded ({one_line(error)}); copy preprocessor_config.json from "
            "the checkpoint's source",
            code="vision.processor",
            about=model,
        ) from error
    if hasattr(processor, "max_patches"):
        _set_patches(processor, size, model)
    elif size:
        _set_size(processor, **size)
    return processor


def _set_size(processor: Any, **size: int) -> None:
    processor.size = type(processor.size)(**{**dict(processor.size), **size})  # SizeDict in transformers 5


def _set_patches(processor: Any, size: dict[str, int], model: str) -> None:
    """Sets the limits of Kimi-K2.5's processor, which counts patches and enlarges no image. transformers ignores the
    object in which the published preprocessor_config.json has its fields. Raises SlimxError for fields that change
    what the processor computes and that transformers lacks."""
    published = getattr(processor, "media_proc_cfg", None) or {}
    if published.get("fixed_output_tokens") is not None:
        raise SlimxError(
            f"{model}: preprocessor_config.json sets media_proc_cfg.fixed_output_tokens, which transformers does not "
            "support; set the field to null",
            code="vision.processor",
            about="media_proc_cfg.fixed_output_tokens",
        )
    if "shortest_edge" in size:
        raise SlimxError(
            f"{model}: trainer.vision.min_pixels is set, but the image processor of this model never enlarges images; "
            "remove trainer.vision.min_pixels",
            code="vision.min_pixels",
            about="trainer.vision.min_pixels",
        )
    for name, field in _PATCH_FIELDS.items():
        if field in published:
            setattr(processor, name, published[field])
    if "patch_limit_on_one_side" in published:
        side = published["patch_limit_on_one_side"]
        _set_size(processor, max_height=side, max_width=side)
    if "longest_edge" in size:
        processor.max_patches = size["longest_edge"] // processor.patch_size**2


def prepare(data: bytes, digest: str) -> Grid | str:
    """Stores the pixels of the image file `data` under `digest`, and returns their grid; returns the reason instead if
    the image cannot be decoded."""
    try:
        with opened(data) as image:
            pixels, grid = patches(_state["processor"], as_rgb(image))
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        return one_line(error)
    _state["store"].save(digest, pixels, grid)
    return grid


def patches(processor: Any, image: Any) -> tuple[np.ndarray, Grid]:
    """Returns the pixels of a PIL image as the vision tower's patches, float32 [patches, elements of a patch], and the
    numbers of patches along time, height and width."""
    out = processor(images=[image], return_tensors="np")
    frames, high, wide = out["image_grid_thw"][0].tolist()
    return np.ascontiguousarray(out["pixel_values"], np.float32), (frames, high, wide)
