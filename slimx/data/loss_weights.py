"""Loss weights of trained tokens, already divided by the denominator of the whole update."""

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
"""For each aggregation, a function that returns a key of the unit (update, rollout or group) to which a trajectory's
tokens belong; `loss_weights` describes the units."""


def loss_weights(
    trajectories: Sequence[Trajectory], aggregation: Aggregation, *, length: int | None = None
) -> list[np.ndarray]:
    """Returns the loss weight of every predicted token of an update, float32 [L-1] per trajectory: `trained_weights`
    at trained tokens, 0 at others."""
    weights = trained_weights(trajectories, aggregation, length=length)
    return [spread(trajectory, weight) for trajectory, weight in zip(trajectories, weights, strict=True)]


def spread(trajectory: Trajectory, weight: float) -> np.ndarray:
    """Returns `weight` at each trained token of the predicted tokens, and 0 at others, float32 [L-1]."""
    return (trajectory.loss_mask[1:] > 0) * np.float32(weight)


def trained_weights(
    trajectories: Sequence[Trajectory], aggregation: Aggregation, *, length: int | None = None
) -> list[float]:
    """Returns the loss weight of the trained tokens of each trajectory of an update.

    With u the number of units with trained tokens and n_i the number of trained tokens of unit i, a trained token of
    unit i has the weight 1 / (u * n_i), and all weights sum to 1. The units are:

    - token: the whole update, so all tokens have equal weight (DAPO, 2503.14476);
    - sample: a rollout with all its trajectories (the original GRPO, 2402.03300, where a rollout has one);
    - prompt: a group with all its rollouts (2510.13786, "prompt average").

    Two aggregations do not divide by the number of tokens, so longer rollouts have more weight and the sum is not 1. A
    trained token has the weight 1 / (u * `length`) with rollouts as units (constant; Dr. GRPO, 2503.20783), or 1 / u
    with groups as units (sum; DPO). `length` is required for constant.

    Units are identified by `group_id` and `rollout_id`, regardless of the order of `trajectories`. Raises SlimxError if
    the update has no trained token.
    """
    unit_of = UNITS[aggregation]
    trained: dict[Hashable, int] = {}
    for trajectory in trajectories:
        unit = unit_of(trajectory)
        trained[unit] = trained.get(unit, 0) + trajectory.trained_tokens
    units = sum(1 for tokens in trained.values() if tokens)
    if not units:
        raise SlimxError(
            "the batch has no trained token, because loss_mask is 0 at all tokens; return from the generate hook a "
            "loss_mask that is 1 at the tokens to train on",
            code="data.untrained",
            about="loss_mask",
        )
    weights = []
    for trajectory in trajectories:
        denominator = units
        if aggregation == "constant":
            if length is None:
                raise ValueError("aggregation 'constant' requires `length`")
            denominator = units * length
        elif aggregation != "sum":
            denominator = units * max(trained[unit_of(trajectory)], 1)
        weights.append(1 / denominator)
    return weights
