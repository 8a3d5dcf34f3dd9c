"""Training batches: trajectories become rows, and rows are packed into micro-batches.

The `weight` of a trained token is already divided by the denominator of the whole update (such as its number of trained
tokens). The sum of `weight * loss` over micro-batches and data-parallel ranks is therefore the loss of the whole
update, regardless of how rows are packed, of the number of micro-batches, and of the parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slimx.config.sections.algorithm import Algorithm
from slimx.data.columns import COLUMNS, Column, TokenColumns
from slimx.data.records import Image, Trajectory
from slimx.errors import SlimxError


@dataclass(kw_only=True, slots=True)
class TrainingRow(TokenColumns):
    """Per-token columns of one trajectory, aligned with its predicted tokens: entry t belongs to the prediction of
    token t + 1."""

    images: list[Image] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(kw_only=True, slots=True)
class MicroBatch(TokenColumns):
    """Rows packed into one forward pass of T positions. A column is None if no row has it."""

    lengths: list[int]
    """Number of positions of each packed sequence, including its padding; the sum is T. If the micro-batch itself is
    padded, its padding is an additional last sequence."""
    padding: np.ndarray
    """bool [T]: True at padding positions, which the router's auxiliary losses ignore."""
    rows: list[int]
    """For each packed sequence, the index of its row in the update; padding of the micro-batch itself has no entry."""
    route_layers: tuple[int, ...] | None = None
    """Global indices of the decoder layers on the second axis of `routed_experts`; None: all decoder layers, in
    order."""
    images: list[list[Image]] | None = None
    """For each packed sequence of a row, its images; None if no row has images."""
    routed: np.ndarray | None = None
    """bool [T]: True at positions whose row has `routed_experts`; None if all rows have it or none has."""


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """Batch of one optimizer step (an update). `shards[d]` contains the micro-batches of data-parallel rank d; every
    rank has the same number of them."""

    shards: list[list[MicroBatch]]
    tokens: int
    """Number of positions in the batch, without padding."""
    trained_tokens: int
    """Number of positions with a loss weight above 0."""
    imbalance: float
    """Predicted time of the update divided by its time under perfect balance, minus 1: the relative time lost by
    waiting for the slowest data-parallel rank."""

    def unpack(self, results: Sequence[Sequence[np.ndarray]], rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Splits per-token results of all micro-batches into one array [n, ...] per row, in the order of `rows`, and
        drops the padding. `results[d][m]` [T, ...]: result of micro-batch m of data-parallel rank d."""
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
    """Aligns each trajectory with the tokens that it predicts, and returns one row per trajectory.

    `advantages`: for each trajectory one number, or one per predicted token [L-1]. `weights`: loss weights of each
    trajectory [L-1] (`slimx.data.loss_weights`). `algorithm`: settings that decide which optional columns are needed
    (`Column.needed`); None: none of those columns. Raises SlimxError naming a trajectory that lacks a needed column at
    a trained token, or lacks a column that other trajectories have."""
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
                images=trajectory.images,
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
                f"trajectory {without[0]} has no {name}, but other trajectories of the same update have it; set "
                f"{name} for all trajectories or for none",
                code="data.column",
                about=without[0],
            )
    return rows


def _aligned(
    trajectory: Trajectory, name: str, column: Column, source: str, algorithm: Algorithm | None
) -> np.ndarray | None:
    """Returns column `name` of a trajectory's row [L-1, ...], from the trajectory's field `source`. Returns None if the
    column is optional and the trajectory lacks it, or if `algorithm` does not need it."""
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
            size = f" (top {shape[0]})" if shape else ""
            raise SlimxError(
                f"trajectory {trajectory.id} lacks {name}{size} for trained tokens, which the algorithm section now "
                "requires; generate the trajectory again",
                code="data.column",
                about=trajectory.id,
            )
    return np.nan_to_num(values[1:], nan=column.fill).astype(column.dtype)
