"""The Bradley-Terry loss of a reward model, by its derivatives.

The loss of a pair is -log sigmoid(c - r - m) with the scores c and r of the chosen and the rejected answer and the
pair's margin m (InstructGPT, 2203.02155; with margins Llama 2, 2307.09288). Its derivatives are -sigmoid(m - (c - r))
with respect to c and the opposite with respect to r. If the scores are measured under the weights of the gradient,
weight x derivative x score has the loss's gradient, and neither packing nor layout has to keep a pair together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimx.data.batch import TrainingRow
from slimx.data.columns import COLUMNS
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError

MARGIN = "margin"
"""Key of a prompt's metadata: required score difference of chosen and rejected answer; default 0."""


def assign_slopes(
    rows: Sequence[TrainingRow], values: Sequence[np.ndarray], margins: Sequence[float]
) -> dict[str, float]:
    """Sets the derivatives of an update's rows (in `advantages`, with the opposite sign); returns the update's metrics.
    Chosen and rejected answers alternate in `rows`.

    `values`: under the current weights, [n] per row; the score is that of the last token. `margins`: per pair."""
    scores = np.array([value[-1] for value in values], np.float64).reshape(-1, 2)
    difference = scores[:, 0] - scores[:, 1]
    missing = np.asarray(margins, np.float64) - difference
    strength = np.exp(-np.logaddexp(0.0, -missing))  # sigmoid
    for row, slope in zip(rows, np.stack([strength, -strength], 1).reshape(-1), strict=True):
        row.advantages = np.full(len(row), slope, np.float32)
    return preference_metrics(difference) | {"preference/loss": float(np.logaddexp(0.0, missing).mean())}


def preference_metrics(difference: np.ndarray) -> dict[str, float]:
    """Returns accuracy (a tie counts half) and mean of the score differences, chosen minus rejected [n]."""
    right = (difference > 0) + 0.5 * (difference == 0)
    return {"preference/accuracy": float(right.mean()), "preference/margin": float(difference.mean())}


def pair_rows(groups: Sequence[Group]) -> list[TrainingRow]:
    """Returns two rows per group, its trajectory with the higher reward first, all of one update.

    Unlike a policy's row, a row includes its last token, which has the score: L positions for L tokens. That position
    has the weight 1 / pairs, all others 0. Raises SlimxError for a group that is not a pair."""
    rows = []
    for group in groups:
        pair = sorted(group.trajectories, key=lambda trajectory: -(trajectory.reward or 0.0))
        if len(pair) != 2 or pair[0].reward == pair[1].reward:
            raise SlimxError(
                f"group {group.id} of prompt {group.prompt.id} is not a pair: a reward model learns from two "
                "trajectories with different rewards; have the generate hook return them",
                code="data.pair",
                about=group.id,
            )
        rows += [_pair_row(trajectory, 1.0 / len(groups)) for trajectory in pair]
    return rows


def _pair_row(trajectory: Trajectory, weight: float) -> TrainingRow:
    tokens = trajectory.token_ids.astype(np.int64)
    tokens = trajectory.token_ids.astype(np.int64)

    def filled(name: str) -> np.ndarray:
        return np.full(len(tokens), COLUMNS[name].fill, COLUMNS[name].dtype)

    row = TrainingRow(
        tokens=tokens,
        labels=np.append(tokens[1:], tokens[-1]),  # not read
        weight=filled("weight"),
        advantages=filled("advantages"),
        rollout_logprobs=filled("rollout_logprobs"),
        versions=filled("versions"),
        temperature=filled("temperature"),
    )
    row.weight[-1] = weight
    return row
