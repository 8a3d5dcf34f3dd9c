"""Images, and the directory of a model that shows them, for tests of prompts with images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from slimx.extras.quickstart import make_vision_model

TOKEN = make_vision_model.TOKENS["image_token_id"]
PATCH, MERGE = 8, 2


def picture(wide: int = 32, high: int = 32, kind: str = "PNG", seed: int = 0, **options: Any) -> bytes:
    """Returns an image file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (high, wide, 3), np.uint8)
    return encoded(Image.fromarray(pixels), kind, **options)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Returns an image as a file of format `kind`."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_model(directory: Path, kind: str = "Qwen2VLImageProcessor", **size: int) -> Path:
    """Writes a tokenizer, an image processor of 16 x 16 pixels per token, and what config.json says about images."""
    directory.mkdir(exist_ok=True)
    make_vision_model.write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"image_token_id": TOKEN}))
    fields = {
        "image_processor_type": kind,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * 16**2, "longest_edge": 64 * 16**2} | size,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))
    return directory
