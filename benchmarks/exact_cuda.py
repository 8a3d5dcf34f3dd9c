"""Compares the speed of exact mode's kernels on a GPU with torch's, alternating in one run.

    python benchmarks/exact_cuda.py [--rounds 9]

A line has the microseconds of both, and how many times as long exact mode takes: linear layers of a decode step and of
a packed batch, attention of the trainer and of a decode step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))  # slimx need not be installed

from quantities import positive

from slimx.extras.exact.operations.forward import kernel_cuda as exact
from slimx.extras.exact.operations.forward.reference import Gathered

ROWS = (1, 64, 4096)
SIDE = 2048
LENGTH, HEADS, GROUPS, HEAD = 2048, 16, 4, 128


def microseconds(work: Callable[[], object]) -> float:
    """Returns the time of one call on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def compare(name: str, ours: Callable[[], object], torchs: Callable[[], object], rounds: int) -> str:
    """Returns a line that compares two functions, called alternately."""
    for work in (ours, torchs) * 2:
        work()
    times = [(microseconds(ours), microseconds(torchs)) for _ in range(rounds)]
    mine, other = (median(column) for column in zip(*times, strict=True))
    return f"{name:<44} {mine:10.0f} us, torch {other:10.0f} us, {mine / other:6.1f} times"


def lines(rounds: int) -> list[str]:
    """Returns a line for each operation."""
    out = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(SIDE, SIDE, dtype=dtype, device="cuda")
        for rows in ROWS:
            x = torch.randn(rows, SIDE, dtype=dtype, device="cuda")
            name = f"linear {rows} x {SIDE} x {SIDE}, {str(dtype)[6:]}"
            ours = lambda x=x, weight=weight, dtype=dtype: exact.linear(x, [weight], [len(x)], 1, dtype)  # noqa: E731
            out.append(compare(name, ours, lambda x=x, weight=weight: linear(x, weight), rounds))
        key, value = (torch.randn(LENGTH, GROUPS, HEAD, dtype=dtype, device="cuda") for _ in range(2))
        index = torch.arange(LENGTH, dtype=torch.int32, device="cuda")
        for rows in (LENGTH, 1):
            query = torch.randn(rows, HEADS, HEAD, dtype=dtype, device="cuda")
            length = torch.arange(LENGTH - rows + 1, LENGTH + 1, device="cuda")
            read = Gathered(key, value, index, torch.zeros_like(length), length)
            heads = [part.transpose(0, 1)[None] for part in (query, key, value)]
            torchs = lambda heads=heads, rows=rows: scaled_dot_product_attention(  # noqa: E731
                *heads, is_causal=rows > 1, enable_gqa=True
            )
            ours = lambda query=query, read=read: exact.attend(query, read, HEAD**-0.5, None)  # noqa: E731
            name = f"attention {rows} of {LENGTH}, {HEADS}/{GROUPS} heads, {str(dtype)[6:]}"
            out.append(compare(name, ours, torchs, rounds))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=9)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/exact_cuda.py measures a GPU, and this process has none: run it where one is")
    print(*lines(options.rounds), sep="\n")


if __name__ == "__main__":
    main()
