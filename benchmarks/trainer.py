"""Cost of slimx's training step over a bare megatron-core loop on the same micro-batches and layout.

    python benchmarks/trainer.py [--model qwen3_next] [--pairs 20] [--ranks 1 2 4] [--rows 192] [--json FILE]

Both alternate in the same processes, A B B A A B B A ..., so that other work on the machine affects both. A is slimx's
`Trainer.train_step`: routes, log-probs in chunks, loss, log-prob gap, metrics, learning rate. B is megatron-core's own
GPTModel, schedule and optimizer with the same loss and nothing else (bare_megatron.py). The benchmark stops if the
gradient norms of the two differ.

The figure is A / B, pair by pair: the median with its 95% interval (order statistics of the binomial distribution). The
same ratio is given for the ranks' CPU seconds, which are more meaningful than wall time on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from machine import cpu_seconds, surroundings
from peer import Peer
from quantities import positive
from trainer_model import MODELS, make_model
from trainer_rank import VERSION, TrainerRank

from slimx.data.batch import MicroBatch, TrainingRow
from slimx.data.packing import pack
from slimx.errors import SlimxError
from slimx.runtime.ports import free_port

LAYOUTS: dict[int, dict[str, Any]] = {
    1: {"world_size": 1},
    2: {"world_size": 2, "expert": 2},
    4: {"world_size": 4, "tensor": 2, "expert": 2},
}
"""Ranks -> keys of `trainer`."""
GOAL = 1.05
"""Largest accepted ratio of slimx's step to the bare one, on 1 and 2 ranks."""
SHORTEST_STEP_S = 1.0
"""Minimum duration of a step, in seconds. In shorter steps, fixed costs would dominate the comparison."""
WARMUP = 2
ROWS, MEAN, LIMIT = 192, 256, 8192
"""Rows of a step, mean tokens of a row, and limit of a micro-batch in tokens."""


def make_shards(ranks: int, count: int = ROWS, limit: int = LIMIT) -> list[list[MicroBatch]]:
    """Returns the micro-batches of a step of `count` rows, by rank."""
    random, rows = np.random.default_rng(1), []
    for length in random.integers(MEAN // 2, MEAN * 3 // 2, count):
        tokens = random.integers(1, 100, length + 1)
        rows.append(
            TrainingRow(
                tokens=tokens[:-1],
                labels=tokens[1:],
                weight=np.full(length, 1 / (count * MEAN), np.float32),
                advantages=np.full(length, random.normal(), np.float32),
                rollout_logprobs=random.normal(-4.6, 0.1, length).astype(np.float32),
                versions=np.full(length, VERSION),
                temperature=np.ones(length, np.float32),
                routed_experts=None,
            )
        )
    layout = LAYOUTS[ranks]
    tensor = layout.get("tensor", 1)
    batch = pack(rows, data_size=ranks // tensor, max_tokens=limit, multiple_of=tensor)
    return [batch.shards[rank // tensor] for rank in range(ranks)]


def measure(ranks: int, model: str, pairs: int, rows: int) -> dict[str, list[float]]:
    """Returns the seconds of each step of slimx and of the bare loop, and the CPU seconds of all ranks (`slimx_cpu`,
    `bare_cpu`). Element i of all four is pair i."""
    init_method = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    peers = [Peer(TrainerRank, rank, LAYOUTS[ranks], model, init_method) for rank in range(ranks)]
    out: dict[str, list[float]] = {"slimx": [], "bare": [], "slimx_cpu": [], "bare_cpu": []}
    try:
        for peer in peers:
            peer.ready()
        with ThreadPoolExecutor(ranks) as threads:
            list(threads.map(lambda peer, shard: peer.call("hold", shard), peers, make_shards(ranks, rows)))
            for number in range(-WARMUP, pairs):
                norms = {}
                for side in ("slimx", "bare") if number % 2 == 0 else ("bare", "slimx"):
                    done = list(threads.map(lambda peer, side=side: peer.call(f"{side}_step"), peers))
                    seconds, cpu, (norms[side], *_) = zip(*done, strict=True)
                    if number >= 0:
                        out[side].append(max(seconds))
                        out[f"{side}_cpu"].append(sum(cpu))
                if abs(norms["slimx"] - norms["bare"]) > 1e-4 * norms["bare"]:
                    raise SlimxError(f"gradient norms differ: slimx {norms['slimx']:.6g}, bare {norms['bare']:.6g}")
            list(threads.map(lambda peer: peer.call("stop"), peers))
    finally:
        for peer in peers:
            peer.stop()
    return out


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Returns the median and the narrowest pair of order statistics that contains it with a probability of 95%."""
    count, ordered = len(values), np.sort(values)
    outside, rank = 0.0, 0
    while outside + comb(count, rank) / 2**count <= 0.025:
        outside += comb(count, rank) / 2**count
        rank += 1
    low = max(rank - 1, 0)
    return float(np.median(values)), float(ordered[low]), float(ordered[-1 - low])


def main() -> int:
    parser = argparse.ArgumentParser(description="slimx's training step, compared with a bare megatron-core loop")
    parser.add_argument("--model", default=MODELS[0], choices=MODELS, help="architecture, tiny and random")
    parser.add_argument("--pairs", type=positive, default=20, help="pairs of steps per layout")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2, 4], choices=LAYOUTS, help="layouts")
    parser.add_argument("--rows", type=positive, default=ROWS, help="rows of a step")
    parser.add_argument("--json", type=Path, help="file that gets every single figure")
    arguments = parser.parse_args()
    if arguments.pairs < 6:
        parser.error(f"--pairs is {arguments.pairs}: a 95% interval of a median needs 6 at least")
    began, others, figures = time.perf_counter(), cpu_seconds(), {}
    interval = "  95% interval  "
    print(f"{'ranks':<6}{'layout':<12}{'slimx s':>9}{'bare s':>9}{'ratio':>8}{interval}{'by CPU':>8}{interval}goal")
    with tempfile.TemporaryDirectory(prefix="slimx-benchmark-") as directory:
        model = str(Path(directory) / "model")
        make_model(arguments.model, Path(model))
        for ranks in arguments.ranks:
            found = figures[ranks] = measure(ranks, model, arguments.pairs, arguments.rows)
            slimx, bare = (np.array(found[side]) for side in ("slimx", "bare"))
            middle, low, high = median_interval(slimx / bare)
            by_cpu = median_interval(np.array(found["slimx_cpu"]) / np.array(found["bare_cpu"]))
            names = {"tensor": "TP", "expert": "EP"}
            layout = "x".join(f"{short}{LAYOUTS[ranks][key]}" for key, short in names.items() if key in LAYOUTS[ranks])
            goal = "reported" if ranks > 2 else "met" if middle <= GOAL else f"missed ({GOAL:.2f})"
            print(
                f"{ranks:<6}{layout or 'one rank':<12}{np.median(slimx):>9.2f}{np.median(bare):>9.2f}{middle:>8.3f}  "
                f"{low:.3f} to {high:.3f}{by_cpu[0]:>8.3f}  {by_cpu[1]:.3f} to {by_cpu[2]:.3f}  {goal}",
                flush=True,
            )
            if min(np.median(slimx), np.median(bare)) < SHORTEST_STEP_S:
                raise SlimxError(f"a step took less than {SHORTEST_STEP_S} s; give more --rows")
    busy = (cpu_seconds() - others) / (time.perf_counter() - began)
    where = surroundings("slimx", "torch", "megatron-core")
    print(f"\n{arguments.pairs} pairs each; other processes used {busy:.2f} cores meanwhile; {where}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"where": where, "others": busy, "seconds": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlimxError as error:
        sys.exit(f"benchmarks/trainer.py: {error}")
