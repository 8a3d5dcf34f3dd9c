"""Batches for the trainers: trajectories as rows, packed into micro-batches with the global denominators inside.

Every trained token carries a `weight` that already contains the global denominator, so that the sum of `weight * loss`
over micro-batches and data-parallel ranks is the loss of the whole update: neither packing, nor the number of
micro-batches, nor the layout can change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimx.config.sections.algorithm import Algorithm
from slimx.data.columns import COLUMNS, TokenColumns
from slimx.data.records import Trajectory
from slimx.errors import SlimxError


@dataclass(kw_only=True, slots=True)
class TrainingRow(TokenColumns):
    """One trajectory, aligned with the tokens it predicts."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(kw_only=True, slots=True)
class MicroBatch(TokenColumns):
    """Rows packed one after another into one forward pass of T tokens; a column that no row has is None."""

    lengths: list[int]
    """Tokens of each packed sequence, its own padding included; padding of the whole (if any) is a last sequence of
    its own. Sums to T."""
    padding: np.ndarray
    """bool [T]: positions that belong to no trajectory; the auxiliary losses of a router leave them out."""
    rows: list[int]
    """The packed row that each sequence is; the padding of the whole is none."""
    route_layers: tuple[int, ...] | None = None
    """Global numbers of the layers on the second axis of `routed_experts`; None: all of them, in order."""
    routed: np.ndarray | None = None
    """bool [T]: positions whose row came with `routed_experts`; None: all of them did, or none."""


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """One optimizer step (an update): `shards[d]` is all that data-parallel rank d receives. Every shard has as many
    micro-batches."""

    shards: list[list[MicroBatch]]
    tokens: int
    """Positions in the batch, padding not counted."""
    trained_tokens: int
    """Positions with a loss."""
    imbalance: float
    """Predicted time over that of perfect balance, minus 1: what data-parallel ranks wait for the slowest."""

    def unpack(self, results: Sequence[Sequence[np.ndarray]], rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Per-token results of all micro-batches, `results[d][m]` [T, ...], back in the order of the rows that were
        packed: one [n, ...] each."""
        found: dict[int, np.ndarray] = {}
        for shard, of_shard in zip(self.shards, results, strict=True):
            for batch, result in zip(shard, of_shard, strict=True):
                starts = np.cumsum([0, *batch.lengths])
                for number, start in zip(batch.rows, starts, strict=False):  # a tail is no row
                    found[number] = result[start : start + len(rows[number])]
        return [found[number] for number in range(len(rows))]


def make_rows(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | np.ndarray],
    weights: Sequence[np.ndarray],
    algorithm: Algorithm | None = None,
) -> list[TrainingRow]:
    """Align trajectories with the tokens they predict.

    `advantages`: one number per trajectory, or one per position, [L-1]. `algorithm`: its `needed` columns are included.
    Raises SlimxError naming a trajectory that lacks such a column at a trained token, or any that others have."""
    rows = []
    for trajectory, advantage, weight in zip(trajectories, advantages, weights, strict=True):
        count = len(trajectory.token_ids) - 1
        aligned = {name: _aligned(trajectory, name, algorithm) for name, column in COLUMNS.items() if column.source}
        rows.append(
            TrainingRow(
                **aligned,
                tokens=trajectory.token_ids[:-1].astype(np.int64),
                weight=weight,
                advantages=np.full(count, 1, dtype=np.float32) * np.asarray(advantage, np.float32),
                versions=trajectory.versions()[1:],
                temperature=np.full(count, trajectory.sampling.get("temperature") or 1.0, np.float32),
                routed_experts=trajectory.routed_experts,
                support=None if trajectory.support is None else trajectory.support.take(np.arange(1, count + 1)),
            )
        )
    for name in COLUMNS:
        without = [each.id for each, row in zip(trajectories, rows, strict=True) if getattr(row, name) is None]
        if 0 < len(without) < len(rows):
            raise SlimxError(
                f"trajectory {without[0]} has no {name}, which others of its update have; give it to all or to none",
                code="data.column",
                about=without[0],
            )
    return rows


def _aligned(trajectory: Trajectory, name: str, algorithm: Algorithm | None) -> np.ndarray | None:
    """Column `name` of a trajectory's row, [L-1, ...]; None if it is optional and the trajectory lacks it, or
    `algorithm` does not need it."""
    column = COLUMNS[name]
    values = getattr(trajectory, column.source)
    if column.needed is None:
        if values is None:
            return None
    else:
        shape = None if algorithm is None else column.needed(algorithm)
        if shape is None:
            return None
        trained = trajectory.loss_mask[1:] > 0
        if values is None or values.shape[1:] != shape or not np.isfinite(values[1:][trained]).all():
            size = f" of {shape[0]} tokens" if shape else ""
            raise SlimxError(
                f"trajectory {trajectory.id} has trained tokens without {name}{size}, which section algorithm asks "
                "for: it was generated before that was set; generate it again",
                code="data.column",
                about=trajectory.id,
            )
    return np.nan_to_num(values[1:], nan=column.fill).astype(column.dtype)
