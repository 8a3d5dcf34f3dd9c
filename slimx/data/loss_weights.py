"""The weight of every trained token in the loss, with the global denominator inside."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np

from slimx.data.records import Trajectory
from slimx.errors import SlimxError

Aggregation = Literal["token", "sample", "prompt", "constant", "sum"]

UNITS: dict[Aggregation, Callable[[Trajectory], Hashable]] = {
    "token": lambda trajectory: None,
    "sample": lambda trajectory: (trajectory.group_id, trajectory.rollout_id),
    "prompt": lambda trajectory: trajectory.group_id,
    "constant": lambda trajectory: (trajectory.group_id, trajectory.rollout_id),
    "sum": lambda trajectory: trajectory.group_id,
}
"""To which unit a trajectory's tokens belong. All units count alike, and within a unit all trained tokens do."""


def loss_weights(
    trajectories: Sequence[Trajectory], aggregation: Aggregation, *, length: int | None = None
) -> list[np.ndarray]:
    """Weight of every predicted token, float32 [L-1] per trajectory, of all trajectories of one update.

    With u the units that train any token and n_i the trained tokens of unit i, a trained token of unit i weighs
    1 / (u * n_i); all weights together sum to 1. The units are:

    - token: the whole update is one, so that each token counts alike (DAPO, 2503.14476);
    - sample: a rollout with all its trajectories (the original GRPO, 2402.03300, where a rollout has one);
    - prompt: a group with all its rollouts (2510.13786, "prompt average").

    Two aggregations do not divide by tokens, so that a longer rollout counts for more, and their weights sum to
    something else than 1: a trained token weighs 1 / (u x `length`) with rollouts as units (constant; Dr. GRPO,
    2503.20783), or 1 / u with groups as units (sum; DPO).

    Neither the order of `trajectories` nor the sizes of groups and rollouts matter: units go by `group_id` and
    `rollout_id`. Raises SlimxError if the update trains no token at all.
    """
    unit_of = UNITS[aggregation]
    masks = [t.loss_mask[1:].astype(np.float64) for t in trajectories]
    trained: dict[Hashable, float] = {}
    for trajectory, mask in zip(trajectories, masks, strict=True):
        unit = unit_of(trajectory)
        trained[unit] = trained.get(unit, 0.0) + mask.sum()
    units = sum(1 for tokens in trained.values() if tokens)
    if not units:
        raise SlimxError(
            "the batch trains no token: every loss_mask is zero; check the generate hook's loss_mask",
            code="data.untrained",
            about="loss_mask",
        )
    if aggregation in ("constant", "sum"):
        whole = units * (length if aggregation == "constant" else 1)
        return [(mask / whole).astype(np.float32) for mask in masks]
    return [
        (mask / (units * max(trained[unit_of(trajectory)], 1.0))).astype(np.float32)
        for trajectory, mask in zip(trajectories, masks, strict=True)
    ]
