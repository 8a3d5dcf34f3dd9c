"""Cost of an uneven split of skewed lengths: predicted for many ranks, measured on two.

    python benchmarks/balance.py [--rounds 10] [--json FILE]

Four ways of distributing the same rows over data-parallel ranks and micro-batches:

    arrival   equally many rows per rank in the order of arrival: no balancing
    greedy    longest first to the rank with the fewest tokens
    tokens    slimx with trainer.balance=tokens
    flops     slimx with trainer.balance=flops

Predicted: the time of a step over that of perfect balance, by the FLOPs of Qwen3-30B-A3B, for lognormal lengths of mean
4,096 cut at 32,768, packed into micro-batches of at most 32,768 tokens. Either ranks meet once per step, or they share
experts and meet in every micro-batch.

Measured: tokens per second of slimx's Trainer on two gloo ranks with the quickstart's model, in turning order. All ways
train the same rows, new ones in each round. The CPU seconds of the busiest rank are shown too: other processes on the
machine hardly change them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from balance_model import METHODS, QWEN3_30B_A3B, flops_of, lognormal_lengths
from balance_rank import LAYOUTS, TrainerRank
from machine import cpu_seconds, surroundings
from peer import Peer
from quantities import positive, positive_float

from slimx.data.batch import TrainingRow
from slimx.data.packing import lay_out, slowdown
from slimx.errors import SlimxError
from slimx.models.layer_kind import SequenceFlops
from slimx.runtime.ports import free_port

ROOT = Path(__file__).parents[1]
SHORTEST_STEP_S = 1.0
"""Minimum duration of a step, in seconds. In shorter steps, fixed costs would dominate the comparison."""
MEAN, LONGEST, LIMIT = 768, 6144, 6144
"""In the measurement: mean and maximum length of a row, and limit of a micro-batch, in tokens."""
MEASURED = ("arrival", "tokens", "flops")
"""Methods that are measured; the others are compared with the first."""


def predict(flops: SequenceFlops, draws: int) -> list[str]:
    """Returns the table of predicted slowdowns, medians over `draws` random batches."""
    lines = [
        f"{'ranks meet':<24}{'DP':>4}{'rows/rank':>11}{'sigma':>7}" + "".join(f"{method:>9}" for method in METHODS)
    ]
    for lockstep, meeting in ((False, "once per step"), (True, "in every micro-batch")):
        for ranks in (2, 8, 64):
            for per_rank, sigma in ((8, 0.5), (32, 0.5), (32, 1.0), (32, 1.5)):
                figures = {method: [] for method in METHODS}
                for seed in range(draws):
                    sizes = lognormal_lengths(ranks * per_rank, sigma=sigma, mean=4096, longest=32768, seed=seed)
                    costs = [flops(size) for size in sizes]
                    for method, distributed in METHODS.items():
                        split = distributed(sizes, costs, ranks, 32768, lockstep)
                        figures[method].append(slowdown(split, costs, lockstep=lockstep))
                cells = "".join(f"{np.median(values):>9.3f}" for values in figures.values())
                lines.append(f"{meeting:<24}{ranks:>4}{per_rank:>11}{sigma:>7.1f}{cells}")
    return lines


def make_row(length: int, random: np.random.Generator) -> TrainingRow:
    """Returns a row of `length` tokens, all of them trained."""
    tokens = random.integers(1, 100, length + 1)
    zeros = np.zeros(length, np.float32)
    return TrainingRow(
        tokens=tokens[:-1],
        labels=tokens[1:],
        weight=np.full(length, 1e-5, np.float32),
        advantages=zeros,
        rollout_logprobs=zeros,
        versions=np.full(length, -1),
        temperature=np.ones(length, np.float32),
        routed_experts=None,
    )


def measure(layout: str, model: str, sigma: float, rounds: int, count: int) -> dict[str, dict[str, list[float]]]:
    """Measures steps of `count` rows. Returns by method and figure, for each round: tokens per second, seconds of the
    step, CPU seconds of the busiest rank, and predicted slowdown. The first round is not counted."""
    hf = json.loads((Path(model) / "config.json").read_text())
    flops, lockstep = flops_of(hf), layout == "EP2"
    init_method = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    peers = [Peer(TrainerRank, rank, layout, model, init_method) for rank in range(2)]
    out: dict[str, dict[str, list[float]]] = {
        method: {"tokens/s": [], "predicted": [], "seconds": [], "cpu": []} for method in MEASURED
    }
    try:
        for peer in peers:
            peer.ready()
        with ThreadPoolExecutor(len(peers)) as threads:
            for number in range(rounds + 1):
                sizes = lognormal_lengths(count, sigma=sigma, mean=MEAN, longest=LONGEST, seed=number)
                rows = [make_row(size, np.random.default_rng(number)) for size in sizes]
                costs = [flops(size) for size in sizes]
                turn = number % len(MEASURED)
                for method in MEASURED[turn:] + MEASURED[:turn]:
                    split = METHODS[method](sizes, costs, 2, LIMIT, lockstep)
                    shards = lay_out(rows, split)
                    took = list(threads.map(lambda peer, shard: peer.call("step", shard), peers, shards))
                    seconds, busiest = np.max(took, axis=0).tolist()
                    if number:
                        out[method]["seconds"].append(seconds)
                        out[method]["cpu"].append(busiest)
                        out[method]["tokens/s"].append(sum(sizes) / seconds)
                        out[method]["predicted"].append(slowdown(split, costs, lockstep=lockstep))
            list(threads.map(lambda peer: peer.call("stop"), peers))
    finally:
        for peer in peers:
            peer.stop()
    return out


def describe(layout: str, sigma: float, figures: dict[str, dict[str, list[float]]]) -> list[str]:
    """Returns rows with the medians of each method, and its speed relative to no balancing, round by round: by wall
    time, by CPU seconds of the busiest rank (which contain no waiting and hardly depend on other processes), and as
    predicted."""
    base = {name: np.array(values) for name, values in figures[MEASURED[0]].items()}
    lines = []
    for method, values in figures.items():
        ratios = np.array(values["tokens/s"]) / base["tokens/s"]
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        promised = np.median(base["predicted"] / np.array(values["predicted"]))
        busiest = np.median(base["cpu"] / np.array(values["cpu"]))
        seconds, speed = np.median(values["seconds"]), np.median(values["tokens/s"])
        measured = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        cells = f"{seconds:>8.2f}{speed:>10,.0f}{measured:>26}{busiest:>9.2f}{promised:>11.2f}"
        lines.append(f"{layout:<8}{sigma:>6.1f}  {method:<9}{cells}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="tokens per second against length skew, with and without balancing")
    parser.add_argument(
        "--rounds", type=positive, default=10, help="measured rounds; in each all methods train the same rows"
    )
    parser.add_argument("--rows", type=positive, default=64, help="measured: rows of a step")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="measured")
    parser.add_argument("--sigmas", nargs="+", type=positive_float, default=[0.5, 1.0], help="measured: skews")
    parser.add_argument("--draws", type=positive, default=10, help="draws of lengths behind a predicted figure")
    parser.add_argument("--json", type=Path, help="file that gets every single figure")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds is {arguments.rounds}: a median and its spread need 2 at least")
    print("\n".join(predict(flops_of(QWEN3_30B_A3B), arguments.draws)))
    print()
    titles = f"{'step s':>8}{'tokens/s':>10}{'over arrival (quartiles)':>26}{'by CPU':>9}{'predicted':>11}"
    print(f"{'layout':<8}{'sigma':>6}  {'method':<9}{titles}")
    began, others = time.perf_counter(), cpu_seconds()
    figures = {}
    with tempfile.TemporaryDirectory(prefix="slimx-benchmark-") as directory:
        model = str(Path(directory) / "model")
        make = [sys.executable, str(ROOT / "slimx/extras/quickstart/make_model.py"), "--out", model]
        subprocess.run(make, check=True, stdout=sys.stderr)
        for layout in arguments.layouts:
            for sigma in arguments.sigmas:
                found = figures[f"{layout} {sigma}"] = measure(layout, model, sigma, arguments.rounds, arguments.rows)
                print("\n".join(describe(layout, sigma, found)), flush=True)
    busy = (cpu_seconds() - others) / (time.perf_counter() - began)
    where = surroundings("slimx", "torch", "megatron-core")
    print(f"\nother processes used {busy:.2f} cores meanwhile; {where}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"where": where, "others": busy, "figures": figures}, indent=1) + "\n")
    shortest = min(np.median(values["seconds"]) for found in figures.values() for values in found.values())
    if shortest < SHORTEST_STEP_S:
        raise SlimxError(f"a step took {shortest:.2f} s; raise --rows until it takes {SHORTEST_STEP_S} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlimxError as error:
        sys.exit(f"benchmarks/balance.py: {error}")
