"""Rounding differences of a gated delta rule if its sequence is cut or batched with others.

    python benchmarks/delta_rule.py [--tokens 512] [--heads 8] [--size 128] [--cut 100] [--requests 4] [--rounds 1]

The rule of trainers and of engines on the CPU (`slimx.extras.recurrent.numerics`), in fp32, on random inputs: keys and
queries of length 1, decays exp(-softplus(x)) and learning rates sigmoid(x) of a standard normal x. A trainer computes a
sequence whole; an engine continues from the state of each part of a prompt and then token by token, in a batch with
other requests. The outputs of each method are compared with those of the whole sequence; that of a batch, with the same
sequence token by token alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from machine import surroundings
from quantities import positive

from slimx.extras.recurrent.numerics.delta_rule import gated_delta_rule, l2norm

Inputs = tuple[torch.Tensor, ...]
"""Queries, keys, values [T, heads, d], logarithms of decays and learning rates [T, heads]."""


def make_inputs(tokens: int, heads: int, size: int, generator: torch.Generator) -> Inputs:
    query, key, value = (torch.randn(tokens, heads, size, generator=generator) for _ in range(3))
    decay, rate = (torch.randn(tokens, heads, generator=generator) for _ in range(2))
    return l2norm(query), l2norm(key), value, -torch.nn.functional.softplus(decay), rate.sigmoid()


def in_parts(inputs: Inputs, parts: list[int]) -> torch.Tensor:
    """Returns the outputs [T, heads, d] of a sequence computed in parts of these lengths, each from the state of the
    previous one."""
    outputs, state = [], None
    for part in zip(*(x.split(parts) for x in inputs), strict=True):
        out, state = gated_delta_rule(*part, [len(part[0])], state)
        outputs.append(out)
    return torch.cat(outputs)


def in_a_batch(sequences: list[Inputs]) -> torch.Tensor:
    """Returns the outputs of the first of several sequences of equal length, all computed token by token in one
    batch."""
    outputs, state = [], None
    for token in range(len(sequences[0][0])):
        step = [torch.cat([x[token : token + 1] for x in inputs]) for inputs in zip(*sequences, strict=True)]
        out, state = gated_delta_rule(*step, [1] * len(sequences), state)
        outputs.append(out[:1])
    return torch.cat(outputs)


def timed(compute: Callable[[], torch.Tensor], rounds: int) -> tuple[torch.Tensor, float]:
    """Returns the outputs and the CPU seconds of the fastest round. On one thread other processes hardly change CPU
    time."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        out = compute()
        best = min(best, time.process_time() - began)
    return out, best


def main() -> None:
    parser = argparse.ArgumentParser(description="a gated delta rule's last bits, by cut and by batch")
    parser.add_argument("--tokens", type=positive, default=512, help="tokens of the sequence")
    parser.add_argument("--heads", type=positive, default=8, help="value heads")
    parser.add_argument("--size", type=positive, default=128, help="rows and columns of a head's state")
    parser.add_argument("--cut", type=positive, default=100, help="tokens of the first of two parts")
    parser.add_argument("--requests", type=positive, default=4, help="sequences of a batch")
    parser.add_argument("--rounds", type=positive, default=1, help="of which the fastest counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    first, *others = (
        make_inputs(arguments.tokens, arguments.heads, arguments.size, generator) for _ in range(arguments.requests)
    )
    tokens, rounds, requests = arguments.tokens, arguments.rounds, arguments.requests
    whole, seconds = timed(lambda: in_parts(first, [tokens]), rounds)
    cut, cut_seconds = timed(lambda: in_parts(first, [arguments.cut, tokens - arguments.cut]), rounds)
    alone, alone_seconds = timed(lambda: in_parts(first, [1] * tokens), rounds)
    batch, batch_seconds = timed(lambda: in_a_batch([first, *others]), 1)
    print(f"largest output {whole.abs().max():.2g}; the whole sequence takes {seconds:.3f} CPU s")
    print(f"{'method':<30}{'outputs that differ':>20}{'by at most':>12}{'CPU s of a sequence':>21}{'over whole':>12}")
    for name, out, other, took in (
        (f"cut once, behind {arguments.cut} tokens", cut, whole, cut_seconds),
        ("token by token", alone, whole, alone_seconds),
        (f"token by token, batch of {requests}", batch, alone, batch_seconds / requests),
    ):
        differ, most = (out != other).float().mean(), (out - other).abs().max()
        print(f"{name:<30}{differ:>20.1%}{most:>12.1e}{took:>21.3f}{took / seconds:>12.1f}")
    print(f"\none thread; {surroundings('slimx', 'torch')}")


if __name__ == "__main__":
    main()
