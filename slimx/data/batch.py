"""Training batches: trajectories become rows, and rows are packed into micro-batches.

The `weight` of a trained token is already divided by the denominator of the whole update (such as its number of trained
tokens). The sum of `weight * loss` over micro-batches and data-parallel ranks is therefore the loss of the whole
update, regardless of how rows are packed, of the number of micro-batches, and of the parallel layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slimx.config.sections.algorithm import Algorithm
from slimx.data.columns import COLUMNS, Column, Shape, TokenColumns
from slimx.data.lazy import Lazy, lacks
from slimx.data.loss_weights import spread
from slimx.data.records import Image, Trajectory
from slimx.errors import SlimxError


@dataclass(kw_only=True, slots=True)
class TrainingRow(TokenColumns):
    """Per-token columns of one trajectory, aligned with its predicted tokens: entry t belongs to the prediction of
    token t + 1."""

    images: list[Image] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def routed(self) -> bool:
        """True if the row has `routed_experts`."""
        return self.routed_experts is not None


class LazyRow(Lazy, TrainingRow):
    """Row whose columns are made from its trajectory when one of them is first read, on the rank that trains on it
    unless the driver needs them. A column that is set keeps its value."""

    __slots__ = ("advantage", "computed", "loss_weight", "names", "trajectory")
    complete = TrainingRow
    trajectory: Trajectory
    advantage: float | np.ndarray
    """Advantage of all predicted tokens, or of each [L-1]."""
    loss_weight: float | np.ndarray
    """Loss weight of the trained tokens, or of each predicted token [L-1]."""

    def __len__(self) -> int:
        return self.trajectory.length - 1

    def __getattr__(self, name: str) -> object:
        if name == "advantages":  # needs no column of the trajectory
            return np.full(len(self), 1, dtype=np.float32) * np.asarray(self.advantage, np.float32)
        return super().__getattr__(name)

    @property
    def routed(self) -> bool:
        return not (lacks(self, "routed_experts") or lacks(self.trajectory, "routed_experts"))

    def compute(self) -> TrainingRow:
        trajectory = self.trajectory
        weight = self.loss_weight
        aligned: dict[str, Any] = {}  # by field: required columns are arrays, optional ones may be None
        for name, column in COLUMNS.items():
            if column.source is not None and column.needed is None:
                values = getattr(trajectory, column.source)
                aligned[name] = None if values is None else _aligned(values, column)
        return TrainingRow(
            **aligned,
            tokens=trajectory.token_ids[:-1].astype(np.int64),
            weight=weight if isinstance(weight, np.ndarray) else spread(trajectory, weight),
            advantages=self.advantages,
            versions=trajectory.versions()[1:],
            temperature=np.full(len(self), trajectory.sampling.get("temperature") or 1.0, np.float32),
            images=trajectory.images,
            routed_experts=trajectory.routed_experts,
            support=None if trajectory.support is None else trajectory.support.take(np.arange(1, trajectory.length)),
        )


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


def micro_batches(value: object) -> Iterator[MicroBatch]:
    """Returns all micro-batches in `value`, which may be a micro-batch or nested lists of them."""
    if isinstance(value, MicroBatch):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from micro_batches(part)


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """Batch of one optimizer step (an update). `shards[d]` contains the micro-batches of data-parallel rank d, which
    are laid out there (`slimx.data.packing.LazyMicroBatch`); every rank has the same number of them."""

    shards: list[list[MicroBatch]]
    tokens: int
    """Number of positions in the batch, without padding."""
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
    weights: Sequence[float | np.ndarray],
    algorithm: Algorithm | None = None,
) -> list[TrainingRow]:
    """Returns one row per trajectory, which aligns the trajectory with the tokens that it predicts.

    `advantages`: for each trajectory one number, or one per predicted token [L-1]. `weights`: for each trajectory the
    loss weight of its trained tokens, or those of its predicted tokens [L-1] (`slimx.data.loss_weights`). `algorithm`:
    settings that decide which optional columns are needed (`Column.needed`); None: none of those columns. These columns
    are made at once, all others when they are first read. Raises SlimxError naming a trajectory that lacks a needed
    column at a trained token, or lacks a column that other trajectories have."""
    rows: list[TrainingRow] = []
    for trajectory, advantage, weight in zip(trajectories, advantages, weights, strict=True):
        rows.append(LazyRow.holding({"trajectory": trajectory.bare(), "advantage": advantage, "loss_weight": weight}))
    for name, column in COLUMNS.items():
        if column.needed is not None:
            shape = None if algorithm is None else column.needed(algorithm)
            for trajectory, row in zip(trajectories, rows, strict=True):
                setattr(row, name, None if shape is None else _needed(trajectory, name, column, shape))
        without = [item.id for item in trajectories if column.source is not None and lacks(item, column.source)]
        if column.needed is None and 0 < len(without) < len(rows):
            raise SlimxError(
                f"trajectory {without[0]} has no {name}, but other trajectories of the same update have it; set "
                f"{name} for all trajectories or for none",
                code="data.column",
                about=without[0],
            )
    return rows


def _needed(trajectory: Trajectory, name: str, column: Column, shape: Shape) -> np.ndarray:
    """Returns column `name` of a trajectory's row [L-1, ...], which an algorithm needs with entries of `shape`."""
    values = getattr(trajectory, column.source or "")
    trained = trajectory.loss_mask[1:] > 0
    if values is None or values.shape[1:] != shape or not np.isfinite(values[1:][trained]).all():
        size = f" (top {shape[0]})" if shape else ""
        raise SlimxError(
            f"trajectory {trajectory.id} lacks {name}{size} for trained tokens, which the algorithm section now "
            "requires; generate the trajectory again",
            code="data.column",
            about=trajectory.id,
        )
    return _aligned(values, column)


def _aligned(values: np.ndarray, column: Column) -> np.ndarray:
    """Returns a trajectory's `values` [L, ...] at its predicted tokens, as the column requires them."""
    return np.nan_to_num(values[1:], nan=column.fill).astype(column.dtype)
