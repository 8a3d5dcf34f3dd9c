"""Speed of packing a bucket on the CPU: slimx's kernels, straightforward torch and a bare copy, in turns in one run.

    python benchmarks/reshard.py [--experts 128] [--rounds 7] [--threads 2]

The work: one layer of Qwen3-30B-A3B in bf16 from TP 4, ETP 2 shards into Hugging Face tensors in one bucket, with the
checksum of every tensor. GB/s count the bytes of the source. Every side's bytes are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # slimx need not be installed

from quantities import positive
from reshard_layer import Job, Pieces, Shards, checksums, straightforward  # noqa: E402

from slimx.reshard.kernels import cpu as kernel  # noqa: E402
from slimx.reshard.kernels.record import OP, RULE  # noqa: E402
from tests import reshard_reference as reference  # noqa: E402

JOBS = [
    Job("bf16 permute", OP.COPY_CHECKED),
    Job("bf16 permute, unchecked", OP.COPY),
    Job("fp8 128x128 ieee", OP.QUANTIZE_FP8, RULE.IEEE),
    Job("fp8 128x128 ue8m0", OP.QUANTIZE_FP8, RULE.UE8M0),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=positive, default=128, help="1.25 GB of source; 7 GB of memory are needed")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    shards = Shards(options.experts)
    print(
        f"{shards.nbytes / 1e9:.2f} GB of bf16, {options.threads} threads, {options.rounds} rounds, "
        f"torch {torch.__version__}\n"
        f"{'GB/s of source: median (best)':58}{'to torch':>12}{'+ checksum':>12}{'to memcpy':>12}",
        flush=True,
    )
    copies = torch.zeros(shards.nbytes, dtype=torch.uint8), torch.ones(shards.nbytes, dtype=torch.uint8)
    for job in JOBS:
        one_job(job, shards, copies, options.rounds)


def one_job(job: Job, shards: Shards, copies: tuple[torch.Tensor, torch.Tensor], rounds: int) -> None:
    """Prints the speed of every side at `job`."""
    pieces = Pieces(shards, job)
    bucket = torch.zeros(pieces.size, dtype=torch.uint8)
    words = max(nbytes for _, nbytes in pieces.places) // 4
    multipliers = torch.from_numpy(reference.multipliers(np.arange(words)).view(np.int64))

    def pack(isa: str) -> None:
        kernel.pack(pieces.records, bucket, pieces.seeds(), np.zeros(len(pieces.places), np.uint32), isa=isa)

    def torch_with_checksums() -> None:
        checksums(straightforward(shards, job)[0], multipliers)

    sides: dict[str, Callable[[], object]] = {f"slimx {isa}": lambda isa=isa: pack(isa) for isa in kernel.isas()[1:]}
    if job.op == OP.COPY_CHECKED or job.rule == RULE.IEEE:  # torch does no other job, or the same one
        compare(job, shards, pieces, bucket, multipliers)
        sides["torch"] = lambda: straightforward(shards, job)
        sides["torch + checksum"] = torch_with_checksums
    sides["memcpy"] = lambda: copies[0].copy_(copies[1])
    seconds = in_turns(sides, rounds)
    for name, taken in seconds.items():
        speed, best = shards.nbytes / median(taken) / 1e9, shards.nbytes / min(taken) / 1e9
        ratios = [
            f"x {ratio(seconds[other], taken):.2f}" if name.startswith("slimx") and other in seconds else ""
            for other in ("torch", "torch + checksum", "memcpy")
        ]
        print(
            f"{job.name:24}{name:20}{speed:6.2f} ({best:5.2f})" + "".join(f"{text:>12}" for text in ratios), flush=True
        )


def ratio(other: list[float], slimx: list[float]) -> float:
    """Returns the median over rounds of the other side's seconds over slimx's."""
    return median(a / b for a, b in zip(other, slimx, strict=True))


def in_turns(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Measures all sides alternately; returns their seconds in every round. The first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for n in range(rounds + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if n:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def compare(job: Job, shards: Shards, pieces: Pieces, bucket: torch.Tensor, multipliers: torch.Tensor) -> None:
    """Exits unless both methods give the same bytes and checksums of every tensor."""
    tensors, _ = straightforward(shards, job)
    expected = checksums(tensors, multipliers).numpy().view(np.uint64) + pieces.seeds()
    for isa in kernel.isas():
        bucket.zero_()
        sums = pieces.seeds()
        kernel.pack(pieces.records, bucket, sums, isa=isa)
        for t, (at, nbytes) in zip(tensors, pieces.places, strict=True):
            if not torch.equal(bucket[at : at + nbytes], t.view(-1).view(torch.uint8)):
                raise SystemExit(f"{job.name}: slimx {isa} and torch differ in tensor {tuple(t.shape)}")
        if not np.array_equal(sums, expected):
            raise SystemExit(f"{job.name}: the checksums of slimx {isa} and torch differ")


if __name__ == "__main__":
    main()
