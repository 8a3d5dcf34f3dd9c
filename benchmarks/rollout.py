"""Cost of rollouts outside the engine, and the time that generating ahead saves.

    python benchmarks/rollout.py [--only generation skew buffer] [--pairs 8] [--rounds 4] [--json FILE]

generation  throughput through hooks, router and buffer, and of a bare HTTP client (benchmarks/rollout_generation.py)
skew        asynchronous against synchronous steps with a length skew of 10 (benchmarks/rollout_skew.py)
buffer      100,000 trajectories through buffer, filter, advantages and packing (benchmarks/rollout_buffer.py)

In each, both sides alternate in one run, so that other work on the machine affects both."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rollout_buffer
import rollout_generation
import rollout_skew
from machine import surroundings
from quantities import positive

from slimx.cluster.connection import device_of, start_ray, stop_ray
from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.errors import SlimxError

ROOT = Path(__file__).parents[1]


def make_config(directory: Path, overrides: Sequence[str]) -> Config:
    """Returns the quickstart's configuration with its untrained model, in `directory`."""
    data = directory.parent / "data"
    tools = ROOT / "slimx/extras/quickstart"
    if not data.exists():
        subprocess.run(
            [sys.executable, tools / "make_model.py", "--out", data / "model"], check=True, stdout=sys.stderr
        )
        subprocess.run([sys.executable, tools / "make_task.py", "--out", data], check=True, stdout=sys.stderr)
    return load_config(
        ROOT / "configs/moe/quickstart.yaml",
        [
            "run.name=benchmark",
            f"run.dir={directory}",
            f"model.path={data / 'model'}",
            "trainer.load=null",
            "trainer.optimizer.lr=1e-10",  # the weights stay as they are: every step is the same work
            f"rollout.prompts={data / 'train.jsonl'}",
            "eval={prompts: null, every: 0}",
            "checkpoint.every=0",
            *overrides,
        ],
    )


def on_ray(config: Config, work: Callable[[], Any], *, trainers: bool) -> dict[str, Any]:
    """Starts Ray, awaits the coroutine that `work` returns, and returns its result."""
    start_ray(config, device_of(config), trainers=trainers)
    try:
        return asyncio.run(work())
    finally:
        stop_ray()


def main() -> int:
    parser = argparse.ArgumentParser(description="cost of rollouts outside the engine")
    parts = ("generation", "skew", "buffer")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--pairs", type=positive, default=8, help="generation: pairs of a batch by each side")
    parser.add_argument("--rounds", type=positive, default=4, help="skew: turns of each bound")
    parser.add_argument("--steps", type=positive, default=6, help="skew: steps of a turn")
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=[1], help="skew: values of max_staleness in addition to 0"
    )
    parser.add_argument("--trajectories", type=positive, default=100_000, help="buffer: how many")
    parser.add_argument("--groups", type=positive, default=rollout_buffer.PER_STEP, help="buffer: of a batch")
    parser.add_argument("--json", type=Path, help="file that gets every single figure")
    arguments = parser.parse_args()
    if arguments.pairs < 2 or arguments.rounds < 2 or arguments.steps < 2:
        parser.error("--pairs, --rounds and --steps are 2 at least: a median and its spread need as many")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended as after Ctrl-C
    found: dict[str, Any] = {}

    def note(text: str) -> None:
        print(text, file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="slimx-benchmark-") as directory:
        root = Path(directory)
        if "generation" in arguments.only:
            config = make_config(root / "generation", rollout_generation.OVERRIDES)
            found["generation"] = on_ray(
                config, lambda: rollout_generation.measure(config, arguments.pairs, note), trainers=False
            )
            print(rollout_generation.describe(found["generation"]), end="\n\n")
        if "skew" in arguments.only:
            skew = make_config(root / "skew", rollout_skew.OVERRIDES)
            bounds = [0, *arguments.bounds]
            found["skew"] = on_ray(
                skew,
                lambda: rollout_skew.measure(skew, bounds, arguments.rounds, arguments.steps, note),
                trainers=True,
            )
            print(rollout_skew.describe(found["skew"]), end="\n\n")
    if "buffer" in arguments.only:
        found["buffer"] = rollout_buffer.measure(arguments.trajectories, mean=192, per_step=arguments.groups)
        print(rollout_buffer.describe(found["buffer"]), end="\n\n")
    where = surroundings("slimx", "torch", "megatron-core", "sglang", "sglang-router", "ray", "numpy")
    print(where)
    if arguments.json:
        arguments.json.write_text(json.dumps({"where": where, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlimxError as error:
        sys.exit(f"benchmarks/rollout.py: {error}")
