"""Batches for the trainers: trajectories as rows, packed into micro-batches that include the global denominators.

The `weight` of a trained token includes the global denominator. The sum of `weight * loss` over micro-batches and
data-parallel ranks is therefore the loss of the whole update, independent of packing, of the number of micro-batches
and of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimx.config.sections.algorithm import Algorithm
from slimx.data.columns import COLUMNS, Column, TokenColumns
from slimx.data.records import Trajectory
from slimx.errors import SlimxError


@dataclass(kw_only=True, slots=True)
class TrainingRow(TokenColumns):
    """A trajectory, aligned with the tokens that it predicts."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(kw_only=True, slots=True)
class MicroBatch(TokenColumns):
    """Rows packed into one forward pass of T tokens. A column that no row has is None."""

    lengths: list[int]
    """Tokens of each packed sequence, including its padding. Padding of the micro-batch, if any, is an additional last
    sequence. The sum is T."""
    padding: np.ndarray
    """bool [T]: positions of padding, which a router's auxiliary losses ignore."""
    rows: list[int]
    """Row index of each sequence, except that of the micro-batch's padding."""
    route_layers: tuple[int, ...] | None = None
    """Global indices of the layers on the second axis of `routed_experts`; None: all of them, in order."""
    routed: np.ndarray | None = None
    """bool [T]: positions whose row has `routed_experts`; None: all of them have, or none."""


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """Batch of one optimizer step (an update). `shards[d]` has the micro-batches of data-parallel rank d, equally many
    on every rank."""

    shards: list[list[MicroBatch]]
    tokens: int
    """Positions in the batch, without padding."""
    trained_tokens: int
    """Positions with a loss."""
    imbalance: float
    """Predicted time relative to perfect balance, minus 1: the wait for the slowest data-parallel rank."""

    def unpack(self, results: Sequence[Sequence[np.ndarray]], rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Splits per-token results of all micro-batches, `results[d][m]` [T, ...], into one [n, ...] per row, in the
        order of `rows`."""
        by_row: dict[int, np.ndarray] = {}
        for shard, shard_results in zip(self.shards, results, strict=True):
            for batch, result in zip(shard, shard_results, strict=True):
                starts = np.cumsum([0, *batch.lengths])
                for index, start in zip(batch.rows, starts, strict=False):  # the micro-batch's padding has no row
                    by_row[index] = result[start : start + len(rows[index])]
        return [by_row[index] for index in range(len(rows))]


def make_rows(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | np.ndarray],
    weights: Sequence[np.ndarray],
    algorithm: Algorithm | None = None,
) -> list[TrainingRow]:
    """Aligns trajectories with the tokens that they predict.

    `advantages`: one number per trajectory, or one per position, [L-1]. `algorithm`: selects optional columns by their
    `needed`. Raises SlimxError naming a trajectory that lacks such a column at a trained token, or a column that others
    have."""
    rows = []
    for trajectory, advantage, weight in zip(trajectories, advantages, weights, strict=True):
        count = len(trajectory.token_ids) - 1
        aligned: dict[str, Any] = {}  # by field: required columns are arrays, optional ones may be None
        for name, column in COLUMNS.items():
            if column.source is not None:
                aligned[name] = _aligned(trajectory, name, column, column.source, algorithm)
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
        without = []
        for trajectory, row in zip(trajectories, rows, strict=True):
            if getattr(row, name) is None:
                without.append(trajectory.id)
        if 0 < len(without) < len(rows):
            raise SlimxError(
                f"trajectory {without[0]} has no {name}, which others of its update have; set it for all or for none",
                code="data.column",
                about=without[0],
            )
    return rows


def _aligned(
    trajectory: Trajectory, name: str, column: Column, source: str, algorithm: Algorithm | None
) -> np.ndarray | None:
    """Returns column `name` of a trajectory's row, [L-1, ...]; None if it is optional and the trajectory lacks it, or
    `algorithm` does not need it."""
    values = getattr(trajectory, source)
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
                f"trajectory {trajectory.id} has trained tokens without {name}{size}, which section algorithm needs: "
                "it was generated before that was set; generate it again",
                code="data.column",
                about=trajectory.id,
            )
    return np.nan_to_num(values[1:], nan=column.fill).astype(column.dtype)
