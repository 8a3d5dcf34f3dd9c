"""Rows -> micro-batches of equal number on every data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

import numpy as np

from slimx.data.balance import balance
from slimx.data.batch import MicroBatch, Row, TrainBatch
from slimx.errors import SlimxError


def _microbatch_count(sizes: Sequence[int], limit: int) -> int:
    """Micro-batches that first-fit-decreasing needs for `sizes` under `limit` tokens each."""
    bins: list[int] = []
    for size in sorted(sizes, reverse=True):
        for index, used in enumerate(bins):
            if used + size <= limit:
                bins[index] += size
                break
        else:
            bins.append(size)
    return len(bins)


def _fits(parts: list[list[int]], sizes: Sequence[int], limit: int) -> bool:
    return all(sum(sizes[i] for i in part) <= limit for part in parts)


def pack(
    rows: Sequence[Row], *, data_size: int, max_tokens: int, multiple_of: int = 1, sequence_multiple: int = 1
) -> TrainBatch:
    """Distribute rows over data-parallel ranks by tokens, then over equally many micro-batches per rank.

    `sequence_multiple`: every row is padded at its end to a multiple of it (context parallelism cuts each sequence
    into 2 x CP chunks). `multiple_of`: T of each micro-batch is padded to a multiple of it (sequence parallelism wants
    TP x CP). The padding of rows counts towards `max_tokens`, the padding of T does not.
    Raises SlimxError naming the row that alone exceeds `max_tokens`.
    """
    sizes = [_rounded(len(row), sequence_multiple) for row in rows]
    if max(sizes) > max_tokens:
        length = max(len(row) for row in rows) + 1
        padded = f" (padded to a multiple of {sequence_multiple})" if sequence_multiple > 1 else ""
        raise SlimxError(
            f"a trajectory of {length} tokens{padded} does not fit trainer.max_tokens_per_microbatch={max_tokens}; "
            f"raise it or lower rollout.sampling.max_new_tokens"
        )
    if len(rows) < data_size:
        raise SlimxError(
            f"a step of {len(rows)} trajectories cannot feed {data_size} data-parallel ranks; lower trainer.data"
        )
    shards = balance(sizes, data_size)
    count = max(_microbatch_count([sizes[i] for i in shard], max_tokens) for shard in shards)
    while True:  # balanced parts may need one more micro-batch than first fit; every rank gets the same number
        split = [balance([sizes[i] for i in shard], count) for shard in shards]
        if all(_fits(parts, [sizes[i] for i in shard], max_tokens) for parts, shard in zip(split, shards, strict=True)):
            break
        count += 1
    multiple_of = lcm(multiple_of, sequence_multiple)
    return TrainBatch(
        shards=[
            [_pack_rows([rows[shard[i]] for i in sorted(part)], multiple_of, sequence_multiple) for part in parts]
            for parts, shard in zip(split, shards, strict=True)
        ],
        tokens=sum(len(row) for row in rows),
        trained_tokens=int(sum((row.loss_weight > 0).sum() for row in rows)),
    )


def _rounded(number: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-number // multiple) * multiple


def _pack_rows(rows: Sequence[Row], multiple_of: int, sequence_multiple: int) -> MicroBatch:
    """One micro-batch; without rows it is `multiple_of` tokens of padding."""
    lengths = [_rounded(len(row), sequence_multiple) for row in rows]
    tail = -sum(lengths) % multiple_of or (multiple_of if not rows else 0)
    if tail:
        lengths.append(tail)

    def joined(parts: Sequence[np.ndarray], dtype: Any, pad: float = 0) -> np.ndarray:
        """The rows' arrays at their places among `pad`."""
        shape = parts[0].shape[1:] if parts else ()
        out = np.full((sum(lengths), *shape), pad, dtype)
        at = 0
        for part, length in zip(parts, lengths, strict=False):  # a tail has no part of its own
            out[at : at + len(part)] = part
            at += length
        return out

    shapes = {row.routed_experts.shape[1:] for row in rows if row.routed_experts is not None}
    if shapes and (len(shapes) > 1 or any(row.routed_experts is None for row in rows)):
        raise SlimxError("some trajectories of a batch carry routed_experts and some do not, or their shapes differ")
    routes = joined([row.routed_experts for row in rows], rows[0].routed_experts.dtype) if shapes else None
    return MicroBatch(
        tokens=joined([row.tokens for row in rows], np.int64),
        labels=joined([row.labels for row in rows], np.int64),
        loss_weight=joined([row.loss_weight for row in rows], np.float32),
        advantages=joined([row.advantages for row in rows], np.float32),
        rollout_logprobs=joined([row.rollout_logprobs for row in rows], np.float32),
        versions=joined([row.versions for row in rows], np.int64, -1),
        temperature=joined([np.full(len(row), row.temperature) for row in rows], np.float32, 1),
        lengths=lengths,
        padding=joined([np.zeros(len(row), bool) for row in rows], bool, True),
        routed_experts=routes,
    )
