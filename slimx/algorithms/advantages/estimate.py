"""Advantages of a step by the configured algorithm: from its groups' rewards, and from the rows of the whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slimx import entry_points
from slimx.algorithms.advantages.covariance import select_tokens
from slimx.algorithms.advantages.gigpo import step_advantages
from slimx.algorithms.advantages.group import gdpo, gradient_share, grpo, mean, opo, remax, rloo, standardise
from slimx.algorithms.advantages.token_rewards import assign_advantages
from slimx.algorithms.hooks import load_advantages
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.objectives import ADVANTAGES, ClipCov, Gae, Gdpo, Gigpo, KlCov, TokenRewards
from slimx.data.batch import TrainingRow
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError


def group_advantages(algorithm: Algorithm, group: Group) -> list[float | np.ndarray]:
    """The advantage of each trajectory of `group`, in order: one number, or one per predicted token [L-1]. Where
    rewards are per token (PPO, REINFORCE++) or pairs are compared (DPO) they come later, from the whole step, and here
    is what they begin with.

    A rollout counts once, however many trajectories it returned: its reward is their mean, and they share its
    advantage."""
    estimator = algorithm.advantages
    if algorithm.loss.kind == "sft":
        return [1.0] * len(group.trajectories)
    if estimator.kind == "none" or estimator.demonstrated:
        return [0.0] * len(group.trajectories)
    if estimator.kind in ("gae", "reinforce"):
        return [trajectory.reward for trajectory in group.trajectories]
    if not group.trajectories:
        return []
    rollouts = _by_rollout(group)
    rewards = _rewards(rollouts)
    if estimator.kind == "reinforce_baseline":
        baseline = mean(rewards)
        return [trajectory.reward - baseline for trajectory in group.trajectories]
    match estimator.kind:
        case "grpo" | "gpg" | "gigpo":
            std = {"normalize_std": estimator.normalize_std, "eps": estimator.eps}
            values = grpo(rewards, **std)
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
            raise AssertionError(f"no estimator is called {estimator}")
    by_rollout = dict(zip(rollouts, values.tolist(), strict=True))
    out: list[float | np.ndarray] = [by_rollout[trajectory.rollout_id] for trajectory in group.trajectories]
    if isinstance(estimator, Gigpo):
        steps = step_advantages(group.trajectories, gamma=estimator.gamma, **std)
        out = [whole + estimator.step_coef * step for whole, step in zip(out, steps, strict=True)]
    return out


def all_advantages(algorithm: Algorithm, groups: Sequence[Group]) -> list[float | np.ndarray]:
    """Advantages of every trajectory of a step, group after group, by `group_advantages` or the user's hook; GDPO's
    are normalised over the step's rollouts, GPG's scaled by how many of these have a gradient."""
    estimator = algorithm.advantages
    if estimator.kind not in ADVANTAGES:
        return load_advantages(estimator.kind)(groups)
    values = [value for group in groups for value in group_advantages(algorithm, group)]
    if estimator.kind == "gpg":
        share = gradient_share([_rewards(_by_rollout(group)) for group in groups])
        return [value / share for value in values]
    if not isinstance(estimator, Gdpo) or not estimator.whiten:
        return values
    names = [(group.id, trajectory.rollout_id) for group in groups for trajectory in group.trajectories]
    by_rollout = dict(zip(names, values, strict=True))
    normal = dict(zip(by_rollout, standardise(np.array(list(by_rollout.values()))).tolist(), strict=True))
    return [normal[name] for name in names]


def finish_advantages(
    algorithm: Algorithm,
    groups: Sequence[Group],
    updates: Sequence[Sequence[TrainingRow]],
    *,
    policy: Sequence[np.ndarray] | None = None,
    reference: Sequence[np.ndarray] | None = None,
    values: Sequence[np.ndarray] | None = None,
    seed: Sequence[int],
) -> dict[str, float]:
    """Fill the advantages of a step's rows where they come token by token or from pairs, and what else belongs to them
    (a critic's values and returns, selected tokens); metrics of the step.

    `updates`: rows of the groups' trajectories, in order, with `all_advantages` of them. `policy`, `reference`: their
    log-probs [n] under these weights before the step, and `values` a critic's, where the algorithm wants them."""
    rows = [row for update in updates for row in update]
    metrics: dict[str, float] = {}
    if algorithm.advantages.demonstrated:
        assign = entry_points.load("slimx.advantages", algorithm.advantages.kind)
        metrics = assign(algorithm.advantages, groups, rows, policy, reference)
    elif isinstance(algorithm.advantages, TokenRewards):
        # The credited reward, or what it is above the group's mean, falls on a trajectory's last token.
        scores = [float(row.advantages[0]) for row in rows]
        critic = values if isinstance(algorithm.advantages, Gae) else None
        metrics = assign_advantages(algorithm, rows, scores, critic, reference)
    if isinstance(algorithm.loss, ClipCov | KlCov):
        chosen = [select_tokens(algorithm.loss, update, (*seed, number)) for number, update in enumerate(updates)]
        metrics |= {name: float(np.mean([each[name] for each in chosen])) for name in chosen[0]}
    return metrics


def _by_rollout(group: Group) -> dict[str, list[Trajectory]]:
    rollouts: dict[str, list[Trajectory]] = {}
    for trajectory in group.trajectories:
        rollouts.setdefault(trajectory.rollout_id, []).append(trajectory)
    return rollouts


def _rewards(rollouts: Mapping[str, Sequence[Trajectory]]) -> list[float]:
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
