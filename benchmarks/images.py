"""Compares the preparation of images with calls of transformers' image processor.

    python benchmarks/images.py [--images 16] [--width 1024] [--height 768] [--processes 1 2] [--rounds 5]

The images are JPEG files of smooth colors with noise. One process that calls the processor decodes each file and keeps
nothing. slimx (`slimx.extras.vision.prompts.prepare`) hashes each file, and its processes decode it, call the same
processor and store the pixels in the image store, which is empty in each round. Both get one image at a time and one
thread per process. Every round runs all methods, in rotating order, so that other work on the machine affects all of
them. Starting the processes is not measured. The pixels of both must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import cpu_seconds, surroundings
from PIL import Image
from quantities import positive

sys.path.insert(0, str(Path(__file__).parents[1]))
from slimx.config.schema import Config
from slimx.extras.vision.images.processing import load_processor
from slimx.extras.vision.images.store import ImageStore
from slimx.extras.vision.prompts.prepare import Preparation
from slimx.models.families import read_model
from tests.integration.engine_families import MODELS
from tests.integration.vision_oracle import write_processor

PIXELS = {"shortest_edge": 65536, "longest_edge": 1003520}
"""Limits on numbers of pixels of the processor, so that photos keep their usual size."""


def write_files(directory: Path, count: int, wide: int, high: int) -> list[Path]:
    """Writes images of smooth colors with noise, all different."""
    directory.mkdir()
    paths = []
    for number in range(count):
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize(
            (wide, high), Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse, np.int16) + rng.integers(-8, 9, (high, wide, 3))
        paths.append(directory / f"{number}.jpg")
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths


def write_model(directory: Path) -> None:
    """Writes the configuration of a Qwen3-VL and of its image processor, without weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODELS["qwen3_vl"]))
    write_processor(MODELS["qwen3_vl"], directory)
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"size": PIXELS}))


def make_preparation(root: Path, processes: int) -> tuple[Preparation, Path]:
    """Returns slimx's preparation of images by `processes`, and the directory of its image store."""
    model = root / "model"
    fields: dict[str, Any] = {
        "run": {"dir": str(root / f"run-{processes}")},
        "model": {"path": str(model)},
        "trainer": {"vision": {"processes": processes}},
        "rollout": {"prompts": "none", "engines": [{"name": "actor"}]},
    }
    config = Config.model_validate(fields)
    return Preparation(config, read_model(model)), Path(config.images)


def prepared(preparation: Preparation, store: Path, paths: list[Path]) -> None:
    """Prepares the images for an empty store."""
    shutil.rmtree(store, ignore_errors=True)
    asyncio.run(preparation.expand([preparation.token] * len(paths), [str(path) for path in paths]))


def processed(processor: Any, paths: list[Path]) -> list[np.ndarray]:
    """Returns the pixels of the images, by transformers' processor alone."""
    pixels = []
    for path in paths:
        with Image.open(io.BytesIO(path.read_bytes())) as image:
            pixels.append(processor(images=[image.convert("RGB")], return_tensors="np")["pixel_values"])
    return pixels


def check_equal(store: Path, expected: list[np.ndarray]) -> None:
    """Raises ValueError unless the store in this directory has exactly the pixels that are expected."""
    stored = {ImageStore(store).load(file.stem).tobytes() for file in store.rglob("*.safetensors")}
    if stored != {pixels.astype(np.float32).tobytes() for pixels in expected}:
        raise ValueError("slimx's pixels differ from those of the processor")


def main() -> None:
    parser = argparse.ArgumentParser(description="preparation of images and calls of the image processor")
    parser.add_argument("--images", type=positive, default=16, help="images of a round")
    parser.add_argument("--width", type=positive, default=1024)
    parser.add_argument("--height", type=positive, default=768)
    parser.add_argument("--processes", type=positive, nargs="+", default=[1, 2], help="processes of slimx")
    parser.add_argument("--rounds", type=positive, default=5)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of slimx's processes
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_model(root / "model")
        paths = write_files(root / "files", arguments.images, arguments.width, arguments.height)
        processor = load_processor(str(root / "model"), {})
        made = {count: make_preparation(root, count) for count in arguments.processes}
        methods: dict[str, Callable[[], object]] = {"processor alone": lambda: processed(processor, paths)}
        for count, (preparation, store) in made.items():
            plural = "processes" if count > 1 else "process"
            methods[f"slimx, {count} {plural}"] = lambda p=preparation, s=store: prepared(p, s, paths)
        try:
            for method in methods.values():  # starts processes, and imports what they need
                method()
            rates, others = measured(methods, arguments.rounds, arguments.images)
            expected = processed(processor, paths)
            for _, store in made.values():
                check_equal(store, expected)
        finally:
            for preparation, _ in made.values():
                preparation.close()
    bare = rates["processor alone"]
    nbytes = expected[0].astype(np.float32).nbytes / 2**20
    print(f"{len(paths)} images of {arguments.width} x {arguments.height} pixels, {nbytes:.1f} MiB of pixels each")
    print(f"{'method':<24}{'images per second':>18}{'over processor alone':>22}{'range':>16}")
    for name, found in rates.items():
        ratios = [rate / other for rate, other in zip(found, bare, strict=True)]
        shown = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:<24}{statistics.median(found):>18.2f}{statistics.median(ratios):>22.2f}{shown:>16}")
    print(f"\nmedians of {arguments.rounds} rounds; {others:.1f} CPU s of other processes meanwhile")
    print(surroundings("slimx", "transformers", "pillow"))


def measured(
    methods: dict[str, Callable[[], object]], rounds: int, images: int
) -> tuple[dict[str, list[float]], float]:
    """Returns the images per second of each method in each round, and the CPU seconds of other processes meanwhile."""
    rates: dict[str, list[float]] = {name: [] for name in methods}
    names, busy = list(methods), cpu_seconds()
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            methods[name]()
            rates[name].append(images / (time.perf_counter() - began))
    return rates, cpu_seconds() - busy


if __name__ == "__main__":
    main()
