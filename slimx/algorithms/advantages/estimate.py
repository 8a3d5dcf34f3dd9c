"""Advantages of a step by the configured algorithm: from its groups' rewards, and from the rows of the whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slimx import entry_points
from slimx.algorithms.advantages.group import gdpo, gradient_share, grpo, mean, opo, remax, rloo, standardise
from slimx.algorithms.hooks import load_advantages
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.objectives import ADVANTAGES, Gdpo
from slimx.data.batch import TrainingRow
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError

GROUP = "slimx.advantages"
"""Entry points: classes of `Estimator` by kind of advantages or of loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step before its first update."""

    groups: Sequence[Group]
    updates: Sequence[Sequence[TrainingRow]]
    """Rows of the groups' trajectories, in order, with `all_advantages` of them."""
    policy: Sequence[np.ndarray] | None = None
    """Log-probs [n] of each row under the present weights, where the algorithm needs them."""
    reference: Sequence[np.ndarray] | None = None
    """Log-probs [n] of each row under the reference, likewise."""
    values: Sequence[np.ndarray] | None = None
    """A critic's values [n] of each row, likewise."""
    seed: Sequence[int]

    @property
    def rows(self) -> list[TrainingRow]:
        return [row for update in self.updates for row in update]


class Estimator:
    """Advantages of a kind that `group_advantages` does not have, or columns that a kind of loss computes from them."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm

    def estimate(self, groups: Sequence[Group]) -> list[float | np.ndarray]:
        """Return the advantages of every trajectory, group after group: one number, or one per predicted token [L-1].
        Where they are known only from the whole step (`finish`), what they begin with."""
        return [0.0 for group in groups for _ in group.trajectories]

    def finish(self, step: Step) -> dict[str, float]:
        """Fill columns of the step's rows that depend on all of them; return metrics of the step."""
        return {}


def group_advantages(algorithm: Algorithm, group: Group) -> list[float]:
    """The advantage of each trajectory of `group`, in order.

    A rollout counts once, however many trajectories it returned: its reward is their mean, and they share its
    advantage."""
    estimator = algorithm.advantages
    if algorithm.loss.kind == "sft":
        return [1.0] * len(group.trajectories)
    if estimator.kind == "none":
        return [0.0] * len(group.trajectories)
    if not group.trajectories:
        return []
    rollouts = by_rollout(group)
    rewards = rollout_rewards(rollouts)
    match estimator.kind:
        case "grpo" | "gpg":
            values = grpo(rewards, normalize_std=estimator.normalize_std, eps=estimator.eps)
        case "rloo":
            values = rloo(rewards)
        case "opo":
            trained = [sum(int(each.loss_mask.sum()) for each in members) for members in rollouts.values()]
            values = opo(rewards, trained)
        case "remax":
            if group.baseline is None:
                raise SlimxError(
                    f"group {group.id} has no greedy rollout, the baseline of algorithm.advantages=remax",
                    code="advantages.baseline",
                    about=str(group.id),
                )
            values = remax(rewards, group.baseline)
        case "gdpo":
            values = gdpo(_parts(rollouts), estimator.weights, eps=estimator.eps)
        case _:
            raise SlimxError(
                f"algorithm.advantages={estimator} has no estimator, neither here nor among entry points of {GROUP}: "
                "slimx was installed before it had them; run make build",
            )
    advantage = dict(zip(rollouts, values.tolist(), strict=True))
    return [advantage[trajectory.rollout_id] for trajectory in group.trajectories]


def all_advantages(algorithm: Algorithm, groups: Sequence[Group]) -> list[float | np.ndarray]:
    """Advantages of every trajectory of a step, group after group, by `group_advantages`, an `Estimator` or the user's
    hook; GDPO's are normalised over the step's rollouts, GPG's scaled by how many of these have a gradient."""
    estimator = algorithm.advantages
    if estimator.kind not in ADVANTAGES:
        return load_advantages(estimator.kind)(groups)
    if estimator.kind in entry_points.find(GROUP):
        return entry_points.load(GROUP, estimator.kind)(algorithm).estimate(groups)
    values = [value for group in groups for value in group_advantages(algorithm, group)]
    if estimator.kind == "gpg":
        share = gradient_share([rollout_rewards(by_rollout(group)) for group in groups])
        return [value / share for value in values]
    if not isinstance(estimator, Gdpo) or not estimator.whiten:
        return values
    names = [(group.id, trajectory.rollout_id) for group in groups for trajectory in group.trajectories]
    advantage = dict(zip(names, values, strict=True))
    normal = dict(zip(advantage, standardise(np.array(list(advantage.values()))).tolist(), strict=True))
    return [normal[name] for name in names]


def finish_advantages(algorithm: Algorithm, step: Step) -> dict[str, float]:
    """Fill the columns of a step's rows that depend on all of them: advantages token by token or from pairs, and those
    that the loss computes from advantages; metrics of the step."""
    metrics: dict[str, float] = {}
    for kind in (algorithm.advantages.kind, algorithm.loss.kind):
        if kind in entry_points.find(GROUP):
            metrics |= entry_points.load(GROUP, kind)(algorithm).finish(step)
    return metrics


def by_rollout(group: Group) -> dict[str, list[Trajectory]]:
    """Return the trajectories of each rollout by its id."""
    rollouts: dict[str, list[Trajectory]] = {}
    for trajectory in group.trajectories:
        rollouts.setdefault(trajectory.rollout_id, []).append(trajectory)
    return rollouts


def rollout_rewards(rollouts: Mapping[str, Sequence[Trajectory]]) -> list[float]:
    """Reward of each rollout: the mean of its trajectories' rewards."""
    return [mean([each.reward for each in members]) for members in rollouts.values()]


def _parts(rollouts: Mapping[str, Sequence[Trajectory]]) -> dict[str, list[float]]:
    """Reward parts by name, one value per rollout. Raises SlimxError where a trajectory lacks one."""
    names = dict.fromkeys(name for members in rollouts.values() for each in members for name in each.reward_parts)
    for members in rollouts.values():
        for each in members:
            if not names or names.keys() - each.reward_parts.keys():
                lacking = sorted(names.keys() - each.reward_parts.keys())
                raise SlimxError(
                    f"trajectory {each.id} has no reward part{' ' + lacking[0] if lacking else 's'}, and "
                    "algorithm.advantages=gdpo normalises each part on its own; return a dict from the reward hook, "
                    "with the same names for every trajectory of a prompt",
                    code="advantages.reward_part",
                    about=str(each.id),
                )
    return {name: [mean([each.reward_parts[name] for each in m]) for m in rollouts.values()] for name in names}
