"""Makes a tiny vision-language model and the task of reading a drawn digit.

    python -m examples.pictures.make --out DIR --seed 1

DIR gets `model/`, a seeded Qwen3-VL in the form of published checkpoints; `images/`, PNG files of one digit each, drawn
with seven segments of random place, size and brightness on a noisy ground; and three files of prompts:

- train.jsonl and heldout.jsonl: the image of a digit with the digit as the answer;
- demonstrations.jsonl: responses to training images, of which 30% are right; 70% are the next digit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.utils import logging

from slimx.extras.quickstart.make_vision_model import TOKENS, write_tokenizer

SIZE = 64
"""Width and height of an image in pixels."""
TRAIN, HELD_OUT, DEMONSTRATIONS = 1600, 200, 25_600
RIGHT_SHARE = 0.3
QUESTION = "<image>digit?"
_SEGMENTS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
"""Segments of each digit, as usual: a at the top, then clockwise to f, and g in the middle."""
TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 4, 4], "mrope_interleaved": True},
    "attention_bias": False,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 3,
}
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 96,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1, 3],
    "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.05,
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "torch_dtype": "float32",
    "text_config": TEXT,
    "vision_config": VISION,
    "tie_word_embeddings": False,
    **TOKENS,
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": VISION["patch_size"],
    "merge_size": VISION["spatial_merge_size"],
    "temporal_patch_size": VISION["temporal_patch_size"],
    "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def draw(digit: int, rng: np.random.Generator) -> Image.Image:
    """Returns a picture of `digit`."""
    pixels = rng.integers(0, 60, (SIZE, SIZE)).astype(np.int64)
    wide, high = int(rng.integers(22, 30)), int(rng.integers(36, 46))
    left, top = int(rng.integers(8, SIZE - wide - 8)), int(rng.integers(6, SIZE - high - 6))
    thick, bright = int(rng.integers(4, 7)), int(rng.integers(160, 240))
    right, bottom, middle = left + wide, top + high, top + high // 2
    boxes = {
        "a": (top, left, thick, wide),
        "b": (top, right - thick, high // 2, thick),
        "c": (middle, right - thick, high // 2, thick),
        "d": (bottom - thick, left, thick, wide),
        "e": (middle, left, high // 2, thick),
        "f": (top, left, high // 2, thick),
        "g": (middle - thick // 2, left, thick, wide),
    }
    for segment in _SEGMENTS[digit]:
        y, x, rows, columns = boxes[segment]
        pixels[y : y + rows, x : x + columns] = bright
    return Image.fromarray(pixels.astype(np.uint8)).convert("RGB")


def make_model(out: Path, seed: int) -> None:
    """Writes the model, its image processor and its tokenizer into the directory `out`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        names = ("architectures", "model_type", "torch_dtype")
        fields = {key: value for key, value in CONFIG.items() if key not in names}
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**fields)).to(torch.float32)
    model.save_pretrained(out)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    video = {key: value for key, value in PROCESSOR.items() if key != "image_processor_type"}
    video["video_processor_type"] = "Qwen3VLVideoProcessor"
    (out / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")
    write_tokenizer(out)


def make_task(out: Path, seed: int) -> None:
    """Writes images and prompts into the directory `out`."""
    rng = np.random.default_rng(seed)
    (out / "images").mkdir(parents=True, exist_ok=True)
    digits = rng.integers(0, 10, TRAIN + HELD_OUT).tolist()
    for index, digit in enumerate(digits):
        draw(digit, rng).save(out / "images" / f"{index:04d}.png")
    _write(out / "train.jsonl", (_line(f"digit-{index}", index, digits[index]) for index in range(TRAIN)))
    _write(
        out / "heldout.jsonl", (_line(f"digit-{index}", index, digits[index]) for index in range(TRAIN, len(digits)))
    )
    demonstrations = []
    for number in range(DEMONSTRATIONS):
        index = int(rng.integers(TRAIN))
        shift = 0 if rng.random() < RIGHT_SHARE else 1
        demonstrations.append(_line(f"demo-{number:05d}", index, (digits[index] + shift) % 10))
    _write(out / "demonstrations.jsonl", demonstrations)


def _line(identity: str, index: int, response: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {
        "id": identity,
        "messages": messages,
        "answer": str(response),
        "metadata": {"images": [f"images/{index:04d}.png"]},
    }


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="make a tiny vision-language model and the task of reading digits")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights, the images and the demonstrations")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    make_model(arguments.out / "model", arguments.seed)
    make_task(arguments.out, arguments.seed)
    print(f"{arguments.out}: model, {TRAIN + HELD_OUT} images, train.jsonl, heldout.jsonl, demonstrations.jsonl")


if __name__ == "__main__":
    main()
