"""Compares peak memory and time of log-probs in chunks and from whole logits, forward and backward.

    python benchmarks/logprobs.py [--tokens 8192] [--vocabulary 32768] [--hidden 512] [--rounds 5]

Both sides alternate in this process, on the same hidden states and output weight, without a model. The peak is the
process's resident memory above that at the start, by the kernel's counter (/proc/self/clear_refs resets it). The plain
side is the obvious implementation: log_softmax of the logits in fp32, gather. The chunked one also computes the
entropy.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import surroundings
from quantities import positive

from slimx.trainer.model.logprobs import Targets, chunk_tokens, label_logprobs

MIB = 2**20


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Returns the log-probs [T], computed from all logits at once."""
    logits = (hidden @ weight.t()).float() / targets.temperature[:, None]
    return logits.log_softmax(-1).gather(1, targets.labels[:, None])[:, 0]


def chunked(chunk: int) -> Callable[[torch.Tensor, torch.Tensor, Targets], torch.Tensor]:
    return lambda hidden, weight, targets: label_logprobs(hidden, weight, targets, group=None, chunk=chunk)[0]


def status(field: str) -> int:
    """Returns a field of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def measure(side: Callable, hidden: torch.Tensor, weight: torch.Tensor, targets: Targets) -> tuple[int, float]:
    """Returns the peak bytes above the start, and the seconds, of one forward and backward pass."""
    gc.collect()
    hidden.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")
    resident, began = status("VmRSS"), time.perf_counter()
    side(hidden, weight, targets).sum().backward()
    return status("VmHWM") - resident, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--vocabulary", type=positive, default=32768)
    parser.add_argument("--hidden", type=positive, default=512)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--chunks", type=positive, nargs="*", default=[512, 2048])
    options = parser.parse_args()
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden).requires_grad_()
    weight = (torch.randn(options.vocabulary, options.hidden) / options.hidden**0.5).requires_grad_()
    targets = Targets(
        labels=torch.randint(0, options.vocabulary, (options.tokens,)), temperature=torch.full((options.tokens,), 0.7)
    )
    sides: dict[str, Callable] = {"plain": plain} | {f"chunks of {n}": chunked(n) for n in options.chunks}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        for name, side in sides.items():
            result = measure(side, hidden, weight, targets)
            if number:  # the first round touches fresh memory
                found[name].append(result)
    whole = 4 * options.tokens * options.vocabulary / MIB
    print(surroundings("torch"))
    print(
        f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden}, fp32, {options.rounds} "
        f"rounds; logits {whole:.0f} MiB, gradients of both inputs {(hidden.nbytes + weight.nbytes) / MIB:.0f} MiB; "
        f"chunk of trainer.logprob_chunk_tokens=null: {chunk_tokens(None, options.vocabulary)}\n"
    )
    print(f"{'':16}{'peak MiB':>10}{'of plain':>10}{'seconds':>10}{'of plain (median, range)':>28}")
    base = statistics.median(peak for peak, _ in found["plain"])
    for name, results in found.items():
        peak = statistics.median(peak for peak, _ in results)
        ratios = [mine / other for (_, mine), (_, other) in zip(results, found["plain"], strict=True)]
        seconds = statistics.median(seconds for _, seconds in results)
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        share = f"{peak / base:.2f}" if base >= MIB else "-"  # the kernel's counters are exact to some 100 KiB
        print(f"{name:16}{peak / MIB:>10.0f}{share:>10}{seconds:>10.2f}{spread:>28}")


if __name__ == "__main__":
    main()
