"""Compares publications of a vision-language model with those of its language model alone.

    python benchmarks/publish_vision.py [--layers 4] [--depth 24] [--rounds 9]

One trainer rank publishes a Qwen3-VL-like model to one engine rank within this process
(`slimx.extras.planner.links.rehearsal`), and a Qwen3 that is equal to its language model. Weights are random bf16. Both
publications alternate, so that other work on the machine affects both. A tower has many small tensors; the question is
whether its bytes take longer than those of the language model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

from machine import cpu_seconds, surroundings
from quantities import positive

sys.path.insert(0, str(Path(__file__).parents[1]))
from slimx.extras.planner.links.rehearsal import Rehearsal, one_thread
from slimx.models.families import read_model
from tests.integration.engine_families import MODELS

TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
}
ROTARY = {"mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_type": "default"}
TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [],
}
"""The sizes of Qwen3-VL-2B, with a small vocabulary."""


def rehearsal(directory: Path, layers: int, depth: int, *, tower: bool) -> Rehearsal:
    """Returns the publication of the model with a tower of `depth` blocks, or of its language model."""
    hf = MODELS["qwen3"] | TEXT | {"num_hidden_layers": layers}
    if tower:
        vision = MODELS["qwen3_vl"]["vision_config"] | TOWER | {"depth": depth}
        text = MODELS["qwen3_vl"]["text_config"] | hf | {"rope_scaling": ROTARY}
        hf = MODELS["qwen3_vl"] | {"text_config": text, "vision_config": vision}
    (directory / "config.json").write_text(json.dumps(hf))
    spec = read_model(directory)
    return Rehearsal(spec.table, spec.engine_table())


def main() -> None:
    parser = argparse.ArgumentParser(description="publications with and without a vision tower")
    parser.add_argument("--layers", type=positive, default=4, help="layers of the language model")
    parser.add_argument("--depth", type=positive, default=24, help="blocks of the tower")
    parser.add_argument("--rounds", type=positive, default=9, help="of which one more is not counted")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, one_thread():
        made = {
            name: rehearsal(Path(directory), arguments.layers, arguments.depth, tower=tower)
            for name, tower in (("language model", False), ("with tower", True))
        }
        seconds: dict[str, list[float]] = {name: [] for name in made}
        busy = 0.0
        for number in range(arguments.rounds + 1):
            if number == 1:
                busy = cpu_seconds()
            for name in list(made)[:: -1 if number % 2 else 1]:
                took = asyncio.run(made[name].publish())
                if number:
                    seconds[name].append(took)
        others = cpu_seconds() - busy
    nbytes = {name: sum(bucket.size for bucket in publication.plan.buckets[0]) for name, publication in made.items()}
    print(f"{'publication':<16}{'tensors':>9}{'MiB':>9}{'seconds':>10}{'GB/s':>8}")
    for name, publication in made.items():
        tensors = sum(len(bucket.tensors) for bucket in publication.plan.buckets[0])
        median = statistics.median(seconds[name])
        print(f"{name:<16}{tensors:>9}{nbytes[name] / 2**20:>9.0f}{median:>10.3f}{nbytes[name] / 1e9 / median:>8.2f}")
    text, seeing = made
    ratios = [one / other for one, other in zip(seconds[seeing], seconds[text], strict=True)]
    print(
        f"\nwith tower / language model: {nbytes[seeing] / nbytes[text]:.2f} times the bytes in "
        f"{statistics.median(ratios):.2f} times the seconds ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    print(f"medians of {arguments.rounds} rounds; {others:.1f} CPU s of other processes meanwhile")
    print(surroundings("slimx", "torch"))


if __name__ == "__main__":
    main()
