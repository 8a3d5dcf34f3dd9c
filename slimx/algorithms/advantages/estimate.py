"""Computes the advantages of a step with the configured algorithm: first from the groups' rewards, then from all rows
of the step if the algorithm needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from slimx import entry_points
from slimx.algorithms.advantages.group import gdpo, gradient_share, grpo, mean, opo, remax, reward_of, rloo, standardize
from slimx.algorithms.hooks import load_advantages
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.objectives import ADVANTAGES, Gdpo, Grpo
from slimx.data.batch import TrainingRow
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError

GROUP = "slimx.advantages"
"""Entry point group for subclasses of `Estimator`. The name of an entry point is the kind of advantages or of loss
(`algorithm.advantages`, `algorithm.loss`) that uses the estimator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """Data from which `Estimator.finish` computes the columns of a step; collected before the step's first optimizer
    update."""

    groups: Sequence[Group]
    updates: Sequence[Sequence[TrainingRow]]
    """For each update of the step, the training rows of its trajectories in the order of `groups`, with the advantages
    that `all_advantages` returned."""
    policy: Sequence[np.ndarray] | None = None
    """Log-probs [n] of each row under the current weights; None if the algorithm does not need them."""
    reference: Sequence[np.ndarray] | None = None
    """Log-probs [n] of each row under the reference model; None if the algorithm does not need them."""
    values: Sequence[np.ndarray] | None = None
    """The critic's value estimates [n] for each row; None if the algorithm does not need them."""
    seed: Sequence[int]

    @property
    def rows(self) -> list[TrainingRow]:
        return list(chain(*self.updates))


class Estimator:
    """Base class of extensions that compute advantages which `group_advantages` does not implement, or per-token
    columns that a loss derives from the advantages."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm

    def estimate(self, groups: Sequence[Group]) -> Sequence[float | np.ndarray]:
        """Returns the advantages of every trajectory, group after group: one number per trajectory, or an array [L-1]
        with one number per predicted token. If they depend on the full step, these are initial values that `finish`
        replaces."""
        return [0.0] * sum(len(group.trajectories) for group in groups)

    def finish(self, step: StepData) -> dict[str, float]:
        """Fills those columns of the step's rows that can be computed only from all rows, and returns metrics of the
        step."""
        return {}


def group_advantages(algorithm: Algorithm, group: Group) -> list[float]:
    """Returns the advantage of each trajectory of `group`, in order.

    A rollout counts once, however many trajectories it returned: its reward is the mean of their rewards, and each of
    them is assigned the rollout's advantage."""
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
            options = estimator.narrow(Grpo)
            values = grpo(rewards, normalize_std=options.normalize_std, eps=options.eps)
        case "rloo":
            values = rloo(rewards)
        case "opo":
            values = opo(rewards, [sum(item.trained_tokens for item in members) for members in rollouts.values()])
        case "remax":
            if group.baseline is None:
                raise SlimxError(
                    f"group {group.id} has no greedy rollout, which algorithm.advantages=remax needs as its baseline; "
                    "generate the group again with algorithm.advantages=remax",
                    code="advantages.baseline",
                    about=str(group.id),
                )
            values = remax(rewards, group.baseline)
        case "gdpo":
            weighted = estimator.narrow(Gdpo)
            values = gdpo(_parts(rollouts), weighted.weights, eps=weighted.eps)
        case _:
            raise SlimxError(
                f"the estimator algorithm.advantages={estimator} is neither built in nor an entry point of {GROUP}, "
                "because the installed slimx is older than its source; run `make build`",
            )
    advantage = dict(zip(rollouts, values.tolist(), strict=True))
    return [advantage[trajectory.rollout_id] for trajectory in group.trajectories]


def all_advantages(algorithm: Algorithm, groups: Sequence[Group]) -> Sequence[float | np.ndarray]:
    """Returns the advantages of every trajectory of a step, group after group. They come from `group_advantages`, from
    an `Estimator`, or from the user's hook.

    GDPO's advantages are normalized over the step's rollouts. GPG's are divided by the fraction of rollouts that
    contribute a gradient (`gradient_share`)."""
    estimator = algorithm.advantages
    if estimator.kind not in ADVANTAGES:
        return load_advantages(estimator.kind)(groups)
    if estimator.kind in entry_points.find(GROUP):
        return entry_points.load(GROUP, estimator.kind)(algorithm).estimate(groups)
    values: list[float] = []
    for group in groups:
        values += group_advantages(algorithm, group)
    if estimator.kind == "gpg":
        fraction = gradient_share([rollout_rewards(by_rollout(group)) for group in groups])
        return [value / fraction for value in values]
    if not isinstance(estimator, Gdpo) or not estimator.whiten:
        return values
    rollouts = []
    for group in groups:
        rollouts += [(group.id, trajectory.rollout_id) for trajectory in group.trajectories]
    advantage = dict(zip(rollouts, values, strict=True))
    normal = dict(zip(advantage, standardize(np.array(list(advantage.values()))).tolist(), strict=True))
    return [normal[rollout] for rollout in rollouts]


def finish_advantages(algorithm: Algorithm, step: StepData) -> dict[str, float]:
    """Fills the columns that depend on all rows of a step: per-token or pairwise advantages, and columns that the loss
    derives from advantages. Returns metrics of the step."""
    metrics: dict[str, float] = {}
    for kind in (algorithm.advantages.kind, algorithm.loss.kind):
        if kind in entry_points.find(GROUP):
            metrics |= entry_points.load(GROUP, kind)(algorithm).finish(step)
    return metrics


def by_rollout(group: Group) -> dict[str, list[Trajectory]]:
    """Returns the trajectories of each rollout, by rollout id."""
    rollouts: dict[str, list[Trajectory]] = {}
    for trajectory in group.trajectories:
        rollouts.setdefault(trajectory.rollout_id, []).append(trajectory)
    return rollouts


def rollout_rewards(rollouts: Mapping[str, Sequence[Trajectory]]) -> list[float]:
    """Returns the reward of each rollout: the mean of its trajectories' rewards."""
    return [mean([reward_of(trajectory) for trajectory in members]) for members in rollouts.values()]


def _parts(rollouts: Mapping[str, Sequence[Trajectory]]) -> dict[str, list[float]]:
    """Returns {name of a reward part: its values, one per rollout}. Raises SlimxError if a trajectory lacks a part that
    other trajectories have, or if there are no parts."""
    trajectories = list(chain(*rollouts.values()))
    names = dict.fromkeys(chain(*(trajectory.reward_parts for trajectory in trajectories)))
    for trajectory in trajectories:
        missing = sorted(names.keys() - trajectory.reward_parts.keys())
        if missing or not names:
            raise SlimxError(
                f"trajectory {trajectory.id} has no reward part{' ' + missing[0] if missing else 's'}, but "
                "algorithm.advantages=gdpo normalizes each part separately; return from the reward hook a "
                "dict with the same part names for every trajectory of a prompt",
                code="advantages.reward_part",
                about=str(trajectory.id),
            )
    out: dict[str, list[float]] = {name: [] for name in names}
    for members in rollouts.values():
        for name, values in out.items():
            values.append(mean([trajectory.reward_parts[name] for trajectory in members]))
    return out
