"""Trajectories -> packed micro-batches with the global denominators already inside.

Every trained token carries a `loss_weight` that already contains the global denominator, so that the sum of
`weight * loss` over micro-batches and data-parallel ranks is the loss of the whole batch: neither packing, nor the
number of micro-batches, nor the layout can change it. A trajectory of L tokens gives L-1 positions: position t reads
token t and predicts token t+1, so all arrays below are aligned with the predicted token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slimx.data.records import Trajectory
from slimx.errors import SlimxError


@dataclass(kw_only=True, slots=True)
class Row:
    """One trajectory, aligned with the tokens it predicts; n = L - 1."""

    tokens: np.ndarray
    """int64 [n]: what the model reads."""
    labels: np.ndarray
    """int64 [n]: what it predicts."""
    loss_weight: np.ndarray
    """float32 [n]: 0 where not trained; sums to 1 over the whole batch."""
    advantages: np.ndarray
    """float32 [n]."""
    rollout_logprobs: np.ndarray
    """float32 [n]: the engine's log-probs; 0 where nothing was sampled."""
    versions: np.ndarray
    """int64 [n]: weight version that sampled the label; -1 where nothing was sampled."""
    temperature: float
    routed_experts: np.ndarray | None
    """uint8 or uint16 [n, moe_layers, k], as the engine reported them."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Rows packed one after another into one forward pass of T tokens."""

    tokens: np.ndarray
    """int64 [T]."""
    labels: np.ndarray
    """int64 [T]."""
    loss_weight: np.ndarray
    """float32 [T]."""
    advantages: np.ndarray
    """float32 [T]."""
    rollout_logprobs: np.ndarray
    """float32 [T]."""
    versions: np.ndarray
    """int64 [T]."""
    temperature: np.ndarray
    """float32 [T]."""
    lengths: list[int]
    """Tokens of each packed sequence, padding (if any) as a last sequence of its own; sums to T."""
    routed_experts: np.ndarray | None
    """[T, moe_layers, k]; None if no row has any."""


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """One optimizer step: `shards[d]` is all that data-parallel rank d receives. Every shard has as many
    micro-batches."""

    shards: list[list[MicroBatch]]
    tokens: int
    """Positions in the batch, padding not counted."""
    trained_tokens: int
    """Positions with a loss."""


def loss_weights(trajectories: Sequence[Trajectory], aggregation: Literal["token", "sample"]) -> list[np.ndarray]:
    """Weight of every predicted token, float32 [L-1] per trajectory; all weights together sum to 1.

    token: each trained token counts alike (DAPO, 2503.14476). sample: each trajectory counts alike, and within it each
    trained token (the original GRPO, 2402.03300). Raises SlimxError if the batch trains no token at all.
    """
    masks = [t.loss_mask[1:].astype(np.float64) for t in trajectories]
    trained = [mask.sum() for mask in masks]
    if not sum(trained):
        raise SlimxError("the batch trains no token: every loss_mask is zero; check the generate hook's loss_mask")
    if aggregation == "token":
        total = sum(trained)
        return [(mask / total).astype(np.float32) for mask in masks]
    samples = sum(1 for count in trained if count)
    return [(mask / (samples * max(count, 1))).astype(np.float32) for mask, count in zip(masks, trained, strict=True)]


def make_rows(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], weights: Sequence[np.ndarray]
) -> list[Row]:
    """Align trajectories with the tokens they predict."""
    rows = []
    for trajectory, advantage, weight in zip(trajectories, advantages, weights, strict=True):
        tokens = trajectory.token_ids.astype(np.int64)
        rows.append(
            Row(
                tokens=tokens[:-1],
                labels=tokens[1:],
                loss_weight=weight,
                advantages=np.full(len(tokens) - 1, advantage, dtype=np.float32),
                rollout_logprobs=np.nan_to_num(trajectory.logprobs[1:], nan=0.0).astype(np.float32),
                versions=trajectory.versions()[1:],
                temperature=float(trajectory.sampling.get("temperature") or 1.0),
                routed_experts=trajectory.routed_experts,
            )
        )
    return rows


def balance(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices split into `parts` lists of nearly equal total size: longest first, each to the lightest list."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    totals, out = [0] * parts, [[] for _ in range(parts)]
    for index in order:
        lightest = min(range(parts), key=lambda p: (totals[p], len(out[p]), p))
        out[lightest].append(index)
        totals[lightest] += sizes[index]
    return out


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


def pack(rows: Sequence[Row], *, data_size: int, max_tokens: int, multiple_of: int = 1) -> TrainBatch:
    """Distribute rows over data-parallel ranks by tokens, then over equally many micro-batches per rank.

    `multiple_of`: T of each micro-batch is padded to a multiple of it (sequence parallelism wants the TP size).
    Raises SlimxError naming the row that alone exceeds `max_tokens`.
    """
    sizes = [len(row) for row in rows]
    if max(sizes) > max_tokens:
        raise SlimxError(
            f"a trajectory of {max(sizes) + 1} tokens does not fit trainer.max_tokens_per_microbatch={max_tokens}; "
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
    return TrainBatch(
        shards=[
            [_pack_rows([rows[shard[i]] for i in sorted(part)], multiple_of) for part in parts]
            for parts, shard in zip(split, shards, strict=True)
        ],
        tokens=sum(sizes),
        trained_tokens=int(sum((row.loss_weight > 0).sum() for row in rows)),
    )


def _pack_rows(rows: Sequence[Row], multiple_of: int) -> MicroBatch:
    lengths = [len(row) for row in rows]
    padding = -sum(lengths) % multiple_of or (multiple_of if not rows else 0)
    if padding:
        lengths.append(padding)

    def joined(name: str, dtype: type, pad: float = 0) -> np.ndarray:
        parts = [getattr(row, name) for row in rows] + [np.full(padding, pad, dtype=dtype)]
        return np.concatenate(parts).astype(dtype)

    shapes = {row.routed_experts.shape[1:] for row in rows if row.routed_experts is not None}
    routes = None
    if shapes:
        if len(shapes) > 1 or any(row.routed_experts is None for row in rows):
            raise SlimxError(
                "some trajectories of a batch carry routed_experts and some do not, or their shapes differ"
            )
        dtype = rows[0].routed_experts.dtype
        routes = np.concatenate([row.routed_experts for row in rows] + [np.zeros((padding, *shapes.pop()), dtype)])
    return MicroBatch(
        tokens=joined("tokens", np.int64),
        labels=joined("labels", np.int64),
        loss_weight=joined("loss_weight", np.float32),
        advantages=joined("advantages", np.float32),
        rollout_logprobs=joined("rollout_logprobs", np.float32),
        versions=joined("versions", np.int64, -1),
        temperature=np.concatenate(
            [np.full(n, row.temperature, np.float32) for n, row in zip(lengths, rows, strict=False)]
            + [np.ones(padding, np.float32)]
        ),
        lengths=lengths,
        routed_experts=routes,
    )
