"""Batches for the trainers: trajectories as rows, packed into micro-batches with the global denominators inside.

Every trained token carries a `loss_weight` that already contains the global denominator, so that the sum of
`weight * loss` over micro-batches and data-parallel ranks is the loss of the whole update: neither packing, nor the
number of micro-batches, nor the layout can change it. A trajectory of L tokens gives L-1 positions: position t reads
token t and predicts token t+1, so all arrays below are aligned with the predicted token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimx.data.records import Trajectory
from slimx.data.support import Support
from slimx.errors import SlimxError


@dataclass(kw_only=True, slots=True)
class TokenArrays:
    """Arrays with an entry for each of n predicted tokens: of a trajectory (n = L - 1), or of a micro-batch."""

    tokens: np.ndarray
    """int64 [n]: what the model reads."""
    labels: np.ndarray
    """int64 [n]: what it predicts."""
    loss_weight: np.ndarray
    """float32 [n]: 0 where not trained; sums to 1 over the whole update where the loss is a mean of tokens
    (`slimx.data.loss_weights`)."""
    advantages: np.ndarray
    """float32 [n]."""
    rollout_logprobs: np.ndarray
    """float32 [n]: the engine's log-probs; 0 where nothing was sampled."""
    versions: np.ndarray
    """int64 [n]: weight version that sampled the label; -1 where nothing was sampled."""
    routed_experts: np.ndarray | None
    """uint8 or uint16 [n, moe_layers, k], as the engine reported them."""
    values: np.ndarray | None = None
    """float32 [n]: a critic's, before the step's first update; None where there is no critic."""
    returns: np.ndarray | None = None
    """float32 [n]: what the critic should have said; 0 where not trained."""
    selected: np.ndarray | None = None
    """float32 [n]: 1 at the tokens that their covariance chose, 0 elsewhere; None where the loss chooses none."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [n]: of a teacher that an engine serves; 0 where it scored nothing; None where there is none."""
    teacher_top_ids: np.ndarray | None = None
    """int64 [n, k]: the teacher's likeliest tokens in the label's place; None where none are wanted."""
    teacher_top_logprobs: np.ndarray | None = None
    """float32 [n, k]: their log-probs; 0 where the teacher scored nothing."""
    support: Support | None = None
    """n positions: the tokens from which each label was sampled; None: all of them, everywhere."""


@dataclass(kw_only=True, slots=True)
class TrainingRow(TokenArrays):
    """One trajectory, aligned with the tokens it predicts."""

    temperature: float

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(kw_only=True, slots=True)
class MicroBatch(TokenArrays):
    """Rows packed one after another into one forward pass of T tokens; an array that no row has is None."""

    temperature: np.ndarray
    """float32 [T]."""
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
    *,
    taught: bool = False,
    top: int = 0,
) -> list[TrainingRow]:
    """Align trajectories with the tokens they predict. `advantages`: of each trajectory one number for all its
    positions, or one for each, [L-1]. `taught`: with the log-probs of the teacher that an engine serves, and of its
    `top` likeliest tokens.

    Raises SlimxError naming a trajectory that has a trained token which the teacher did not score."""
    rows = []
    for trajectory, advantage, weight in zip(trajectories, advantages, weights, strict=True):
        tokens = trajectory.token_ids.astype(np.int64)
        rows.append(
            TrainingRow(
                tokens=tokens[:-1],
                labels=tokens[1:],
                loss_weight=weight,
                advantages=np.full(len(tokens) - 1, 1, dtype=np.float32) * np.asarray(advantage, np.float32),
                rollout_logprobs=np.nan_to_num(trajectory.logprobs[1:], nan=0.0).astype(np.float32),
                versions=trajectory.versions()[1:],
                temperature=float(trajectory.sampling.get("temperature") or 1.0),
                routed_experts=trajectory.routed_experts,
                teacher_logprobs=_teacher_logprobs(trajectory) if taught else None,
                **_teacher_top(trajectory, top),
                support=None if trajectory.support is None else trajectory.support.take(np.arange(1, len(tokens))),
            )
        )
    return rows


def _teacher_logprobs(trajectory: Trajectory) -> np.ndarray:
    """float32 [L-1]."""
    values, trained = trajectory.teacher_logprobs, trajectory.loss_mask[1:] > 0
    if values is None or not np.isfinite(values[1:][trained]).all():
        raise SlimxError(
            f"trajectory {trajectory.id} has trained tokens without teacher_logprobs: it was generated before "
            "its teacher was set; generate it again, or set algorithm.teacher to score it in the trainers",
            code="data.teacher_logprobs",
            about=trajectory.id,
        )
    return np.nan_to_num(values[1:], nan=0.0).astype(np.float32)


def _teacher_top(trajectory: Trajectory, top: int) -> dict[str, np.ndarray]:
    """`teacher_top_ids` int64 and `teacher_top_logprobs` float32 [L-1, top]; nothing where none are wanted."""
    if not top:
        return {}
    ids, values, trained = trajectory.teacher_top_ids, trajectory.teacher_top_logprobs, trajectory.loss_mask[1:] > 0
    if ids is None or values is None or ids.shape[1] != top or not np.isfinite(values[1:][trained]).all():
        raise SlimxError(
            f"trajectory {trajectory.id} has trained tokens without the teacher's {top} likeliest ones: it was "
            "generated under another algorithm.teacher_top_k; generate it again",
            code="data.teacher_top",
            about=trajectory.id,
        )
    found = np.nan_to_num(values[1:], nan=0.0).astype(np.float32)
    return {"teacher_top_ids": ids[1:].astype(np.int64), "teacher_top_logprobs": found}
