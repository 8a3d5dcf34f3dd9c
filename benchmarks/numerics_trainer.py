"""Compares a training step of the real Megatron trainer in exact mode with the same step in fast mode.

    python benchmarks/numerics_trainer.py [--sizes tiny hidden512] [--dtypes bfloat16 float32] [--pairs 6]

Two trainers of one rank and one thread alternate in this process, A B B A A B B A ..., on the same
micro-batches: routes, log-probs in chunks, loss, backward, optimizer. The figure is exact / fast, pair by pair: the
median with its 95% interval. The benchmark stops if their gradient norms are not those of the same step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from gloo_rank import enter, prepare
from machine import cpu_seconds, surroundings
from numerics_model import SIZES, make_model
from quantities import positive
from trainer import VERSION, make_shards, median_interval

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.runtime.ports import free_port

ROWS = {"tiny": 32, "hidden512": 6}
"""Rows of a step, with 256 tokens on average, by size."""
LIMIT = 1024
"""Limit of a micro-batch, in tokens."""
NORMS = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest accepted relative difference of gradient norms. It comes from rounding, which in bfloat16 also changes
routes."""
GOAL = 2.0
"""Largest accepted ratio of a step in exact mode to one in fast mode."""


def sections(model: Path, dtype: str, mode: str) -> dict:
    """Returns the configuration of a trainer. With lr 1e-10 the weights hardly change, so every step is the same
    work."""
    return {
        "run": {"dir": str(model)},
        "model": {"path": str(model)},
        "numerics": {"dtype": dtype, "mode": mode},
        "trainer": {"max_tokens_per_microbatch": LIMIT, "optimizer": {"lr": 1e-10}},
        "rollout": {"prompts": "none"},
        "reward": {"function": "exact"},
    }


def measure(model: Path, rows: int, dtype: str, pairs: int) -> np.ndarray:
    """Returns the seconds of each step [pairs, 2], fast and exact."""
    meeting = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    fast, spec, parallel = enter(sections(model, dtype, "fast"), 0, meeting)
    from slimx.trainer.trainer import PolicyTrainer

    exact = Config.model_validate(sections(model, dtype, "exact"))
    trainers = [PolicyTrainer(config, spec, parallel) for config in (fast, exact)]
    batches = make_shards(1, rows, LIMIT)[0]
    out, norms = np.zeros((pairs, 2)), [0.0, 0.0]
    for number in range(-1, pairs):  # the first warms up
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            began = time.perf_counter()
            norms[side] = trainers[side].train_step(batches, step=0, version=VERSION)["optim/grad_norm"]
            out[max(number, 0), side] = time.perf_counter() - began
        if abs(norms[1] - norms[0]) > NORMS[dtype] * norms[0]:
            raise SlimxError(f"gradient norms differ: fast {norms[0]:.6g}, exact {norms[1]:.6g}")
    parallel.destroy()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=NORMS, default=list(NORMS))
    parser.add_argument("--pairs", type=positive, default=6)
    parser.add_argument("--rows", type=positive, help="of a step; by default as many as the size needs")
    options = parser.parse_args()
    if options.pairs < 6:
        parser.error(f"--pairs is {options.pairs}: a 95% interval of a median needs 6 at least")
    prepare()
    print(f"{surroundings('torch', 'megatron-core')}; one thread, {options.pairs} pairs")
    print("| | fast, s | exact, s | exact / fast | 95% interval |\n| --- | --- | --- | --- | --- |")
    began, others, worst = time.perf_counter(), cpu_seconds(), 0.0
    with tempfile.TemporaryDirectory(prefix="slimx-benchmark-") as folder:
        for size in options.sizes:
            for experts in (False, True):
                model = Path(folder) / f"{size}-{experts}"
                make_model(model, size, experts=experts)
                for dtype in options.dtypes:
                    took = measure(model, options.rows or ROWS[size], dtype, options.pairs)
                    middle, low, high = median_interval(took[:, 1] / took[:, 0])
                    worst = max(worst, middle)
                    name = f"{size}, {'8 experts' if experts else 'dense'}, {dtype}"
                    fast, exact = np.median(took, axis=0)
                    print(f"| {name} | {fast:.3f} | {exact:.3f} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)
    busy = (cpu_seconds() - others) / (time.perf_counter() - began)
    print(
        f"\nother processes used {busy:.2f} cores meanwhile; the goal of at most {GOAL} is "
        f"{'met' if worst <= GOAL else 'missed'}"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlimxError as error:
        sys.exit(f"benchmarks/numerics_trainer.py: {error}")
