"""The methods of distributing rows that benchmarks/balance.py compares, and their predicted costs."""

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
Method = Callable[[Sequence[int], Sequence[float], int, int, bool], Split]
"""(tokens of each row, FLOPs of each row, data-parallel ranks, tokens of a micro-batch, True if ranks synchronize in
every micro-batch) -> the rows of each micro-batch of each rank."""


def flops_of(hf: dict[str, Any]) -> SequenceFlops:
    """Returns the function that computes the FLOPs of a Qwen3-MoE for a sequence."""
    return sequence_flops(qwen3_moe.transformer_config(hf), hf["vocab_size"], LayerKind())


def lognormal_lengths(rows: int, *, sigma: float, mean: float, longest: int, seed: int) -> list[int]:
    """Returns lengths in tokens whose logarithms have standard deviation `sigma`, truncated at `longest`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)
    return drawn.astype(int).clip(16, longest).tolist()


def arrival(sizes: Sequence[int], costs: Sequence[float], ranks: int, limit: int, lockstep: bool) -> Split:
    """Gives each rank the same number of rows, in the order of arrival, and fills micro-batches in that order."""
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
    """Gives the longest remaining row to the rank with the fewest tokens, then fills as few micro-batches as fit in the
    same manner."""
    split: Split = []
    for shard in greedy(sizes, ranks):
        lengths = [sizes[i] for i in shard]
        count = len(best_fit(lengths, limit))
        while any(sum(lengths[i] for i in part) > limit for part in greedy(lengths, count)):
            count += 1
        split.append([[shard[i] for i in part] for part in greedy(lengths, count)])
    return _filled(split)


def by_tokens(sizes: Sequence[int], costs: Sequence[float], ranks: int, limit: int, lockstep: bool) -> Split:
    """Balances as `trainer.balance=tokens` does."""
    return distribute(sizes, [float(n) for n in sizes], data_size=ranks, max_tokens=limit, lockstep=lockstep)


def by_flops(sizes: Sequence[int], costs: Sequence[float], ranks: int, limit: int, lockstep: bool) -> Split:
    """Balances as `trainer.balance=flops` does."""
    return distribute(sizes, costs, data_size=ranks, max_tokens=limit, lockstep=lockstep)


METHODS: dict[str, Method] = {"arrival": arrival, "greedy": greedy_tokens, "tokens": by_tokens, "flops": by_flops}


def _filled(split: Split) -> Split:
    """Returns the split with the same number of micro-batches on every rank; the added ones contain only padding."""
    count = max(len(parts) for parts in split)
    return [parts + [[] for _ in range(count - len(parts))] for parts in split]
