"""Pairs of a chosen and a rejected answer as rows of a reward model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimx.data.batch import TrainingRow
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError


def pair_rows(groups: Sequence[Group]) -> list[TrainingRow]:
    """Two rows per group, its trajectory with the higher reward first, all of one update.

    Unlike those of a policy a row reads its last token, where the score is: L positions for L tokens. That position
    weighs 1 / pairs, all others 0. Raises SlimxError for a group that is no pair."""
    rows = []
    for group in groups:
        pair = sorted(group.trajectories, key=lambda trajectory: -(trajectory.reward or 0.0))
        if len(pair) != 2 or pair[0].reward == pair[1].reward:
            raise SlimxError(
                f"group {group.id} of prompt {group.prompt.id} is no pair: a reward model learns from two trajectories "
                "with different rewards; have the generate hook return them",
                code="data.pair",
                about=group.id,
            )
        rows += [_row(trajectory, 1.0 / len(groups)) for trajectory in pair]
    return rows


def _row(trajectory: Trajectory, weight: float) -> TrainingRow:
    tokens = trajectory.token_ids.astype(np.int64)
    loss_weight = np.zeros(len(tokens), np.float32)
    loss_weight[-1] = weight
    return TrainingRow(
        tokens=tokens,
        labels=np.append(tokens[1:], tokens[-1]),  # read by nothing
        loss_weight=loss_weight,
        advantages=np.zeros(len(tokens), np.float32),
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), -1, np.int64),
        temperature=1.0,
        routed_experts=None,
    )
