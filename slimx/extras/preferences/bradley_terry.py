"""Bradley-Terry loss of a reward model, which is trained from the loss's derivatives with respect to the scores.

The loss of a pair is -log sigmoid(c - r - m), with the scores c and r of the chosen and the rejected answer and the
margin m of the pair (InstructGPT, arXiv 2203.02155; with margins Llama 2, arXiv 2307.09288). The derivative of the loss
is -sigmoid(m - (c - r)) with respect to c, and sigmoid(m - (c - r)) with respect to r. If the derivatives are computed
with the same weights as the gradient, weight x derivative x score has the gradient of the loss, and the answers of a
pair may be in different micro-batches and on different ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimx.data.batch import TrainingRow
from slimx.data.columns import COLUMNS
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError

MARGIN = "margin"
"""Key under which a prompt's metadata may contain the margin: the required difference between the scores of the chosen
and the rejected answer. The default margin is 0."""


def assign_slopes(
    rows: Sequence[TrainingRow], values: Sequence[np.ndarray], margins: Sequence[float]
) -> dict[str, float]:
    """Sets `advantages` in the rows of an update to the negative derivatives of the loss with respect to the scores,
    and returns the update's metrics. Chosen and rejected answers alternate in `rows`.

    `values`: for each row, the model's outputs [positions] with the current weights at all positions; the last output
    is the score. `margins`: margin of each pair."""
    scores = np.array([value[-1] for value in values], np.float64).reshape(-1, 2)
    difference = scores[:, 0] - scores[:, 1]
    missing = np.asarray(margins, np.float64) - difference
    strength = np.exp(-np.logaddexp(0.0, -missing))  # sigmoid
    for row, slope in zip(rows, np.stack([strength, -strength], 1).reshape(-1), strict=True):
        row.advantages = np.full(len(row), slope, np.float32)
    return preference_metrics(difference) | {"preference/loss": float(np.logaddexp(0.0, missing).mean())}


def preference_metrics(difference: np.ndarray) -> dict[str, float]:
    """Returns the accuracy and the mean score difference of n pairs. `difference` [n]: score of the chosen minus that
    of the rejected answer. A difference of 0 counts as half correct."""
    right = (difference > 0) + 0.5 * (difference == 0)
    return {"preference/accuracy": float(right.mean()), "preference/margin": float(difference.mean())}


def pair_rows(groups: Sequence[Group]) -> list[TrainingRow]:
    """Returns the training rows of an update: two rows per group, first the row of the trajectory with the higher
    reward.

    Unlike a policy's row, such a row includes the last token, whose value is the score, so L tokens have L positions.
    The last position has the weight 1 / number of pairs; all others have the weight 0. Raises SlimxError for a group
    that does not consist of two trajectories with different rewards.
    """
    rows = []
    for group in groups:
        pair = sorted(group.trajectories, key=lambda trajectory: -(trajectory.reward or 0.0))
        if len(pair) != 2 or pair[0].reward == pair[1].reward:
            raise SlimxError(
                f"group {group.id} of prompt {group.prompt.id} has trajectories with the rewards "
                f"{[item.reward for item in pair]}, but a reward model learns only from pairs with different rewards; "
                "return exactly two trajectories with different rewards from the hook rollout.generate",
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
