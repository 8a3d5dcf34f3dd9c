"""The ways of distributing rows that benchmarks/balance.py compares, and what each is predicted to cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slimx.data.balance import greedy
from slimx.data.packing import Split, best_fit, distribute
from slimx.models.families import qwen3_moe
from slimx.models.flops import sequence_flops
from slimx.models.layer_kind import LayerKind, SequenceFlops

QWEN3_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
}
Way = Callable[[Sequence[int], Sequence[float], int, int, bool], Split]
"""(tokens of each row, FLOPs of each row, data-parallel ranks, tokens of a micro-batch, whether ranks meet in every
micro-batch) -> which rows go where."""


def flops_of(hf: dict[str, Any]) -> SequenceFlops:
    """FLOPs of a Qwen3-MoE."""
    return sequence_flops(qwen3_moe.transformer_config(hf), hf["vocab_size"], LayerKind())


def lognormal_lengths(rows: int, *, sigma: float, mean: float, longest: int, seed: int) -> list[int]:
    """Lengths in tokens whose logarithm is normal with standard deviation `sigma`, cut at `longest`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)
    return drawn.astype(int).clip(16, longest).tolist()


def arrival(sizes: Sequence[int], costs: Sequence[float], ranks: int, limit: int, lockstep: bool) -> Split:
    """Equally many rows for each rank in the order in which they came, and micro-batches filled in that order."""
    split: Split = []
    for rows in np.array_split(np.arange(len(sizes)), ranks):
        parts: list[list[int]] = [[]]
        for row in rows.tolist():
            if parts[-1] and sum(sizes[i] for i in parts[-1]) + sizes[row] > limit:
                parts.append([])
            parts[-1].append(row)
        split.append(parts)
    return _filled(split)


def greedy_tokens(sizes: Sequence[int], costs: Sequence[float], ranks: int, limit: int, lockstep: bool) -> Split:
    """Longest first to the rank with the fewest tokens, then the same among the fewest micro-batches that fit."""
    split: Split = []
    for shard in greedy(sizes, ranks):
        own = [sizes[i] for i in shard]
        count = len(best_fit(own, limit))
        while any(sum(own[i] for i in part) > limit for part in greedy(own, count)):
            count += 1
        split.append([[shard[i] for i in part] for part in greedy(own, count)])
    return _filled(split)


def by_tokens(sizes: Sequence[int], costs: Sequence[float], ranks: int, limit: int, lockstep: bool) -> Split:
    """`trainer.balance=tokens`."""
    return distribute(sizes, [float(n) for n in sizes], data_size=ranks, max_tokens=limit, lockstep=lockstep)


def by_flops(sizes: Sequence[int], costs: Sequence[float], ranks: int, limit: int, lockstep: bool) -> Split:
    """`trainer.balance=flops`."""
    return distribute(sizes, costs, data_size=ranks, max_tokens=limit, lockstep=lockstep)


WAYS: dict[str, Way] = {"arrival": arrival, "greedy": greedy_tokens, "tokens": by_tokens, "flops": by_flops}


def _filled(split: Split) -> Split:
    """With as many micro-batches on every rank, the last ones of padding only."""
    count = max(len(parts) for parts in split)
    return [parts + [[] for _ in range(count - len(parts))] for parts in split]
