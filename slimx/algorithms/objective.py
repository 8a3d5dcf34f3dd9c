"""From the configuration's algorithm to its loss and advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slimx.algorithms import surrogates
from slimx.algorithms.advantages import gdpo, grpo, remax, rloo, standardise
from slimx.algorithms.corrections import correction
from slimx.algorithms.gigpo import step_advantages
from slimx.algorithms.inputs import Loss
from slimx.algorithms.kl import ESTIMATORS
from slimx.algorithms.losses import policy_loss, sft_loss
from slimx.algorithms.surrogates import Surrogate
from slimx.config.algorithm import Algorithm
from slimx.data.records import Group, Trajectory
from slimx.errors import SlimxError


def make_loss(algorithm: Algorithm) -> Loss:
    """The loss function of a configured algorithm."""
    if algorithm.loss == "sft":
        return sft_loss
    gap = algorithm.correction
    return policy_loss(
        make_surrogate(algorithm),
        kl_coef=algorithm.kl_coef,
        kl=ESTIMATORS[algorithm.kl_estimator],
        kl_unbiased=algorithm.kl_unbiased,
        entropy_coef=algorithm.entropy_coef,
        teacher_coef=algorithm.teacher_coef,
        correction=None if gap.kind == "none" else correction(gap.kind, level=gap.level, low=gap.low, high=gap.high),
    )


def make_surrogate(algorithm: Algorithm) -> Surrogate:
    """What the policy gradient maximises."""
    bounds = {"low": algorithm.clip_low, "high": algorithm.clip_high}
    match algorithm.loss:
        case "clip":
            return surrogates.clip(**bounds, dual=algorithm.dual_clip)
        case "gspo":
            return surrogates.gspo(**bounds)
        case "cispo":
            return surrogates.cispo(**bounds)
        case "topr":
            return surrogates.topr()
        case "sapo":
            return surrogates.sapo(tau_positive=algorithm.sapo_tau_positive, tau_negative=algorithm.sapo_tau_negative)
        case "clip_cov":
            return surrogates.clip_cov(**bounds)
        case "kl_cov":
            return surrogates.kl_cov(coef=algorithm.cov_kl_coef)
        case "plain":
            return surrogates.plain()
    raise AssertionError(f"no surrogate is called {algorithm.loss}")


def group_advantages(algorithm: Algorithm, group: Group) -> list[float | np.ndarray]:
    """The advantage of each trajectory of `group`, in order: one number, or one per predicted token [L-1]. Where
    rewards are per token (PPO, REINFORCE++) or pairs are compared (DPO) they come later, from the whole step, and here
    is what they begin with.

    A rollout counts once, however many trajectories it returned: its reward is their mean, and they share its
    advantage."""
    if algorithm.loss == "sft":
        return [1.0] * len(group.trajectories)
    if algorithm.advantages in ("gae", "dpo", "none"):
        return [0.0] * len(group.trajectories)
    if algorithm.advantages == "reinforce":
        return [trajectory.reward for trajectory in group.trajectories]
    rollouts: dict[str, list[Trajectory]] = {}
    for trajectory in group.trajectories:
        rollouts.setdefault(trajectory.rollout_id, []).append(trajectory)
    rewards = [_mean([each.reward for each in members]) for members in rollouts.values()]
    if algorithm.advantages == "reinforce_baseline":
        baseline = _mean(rewards)
        return [trajectory.reward - baseline for trajectory in group.trajectories]
    std = {"normalize_std": algorithm.normalize_std, "eps": algorithm.advantage_eps}
    match algorithm.advantages:
        case "grpo" | "gigpo":
            values = grpo(rewards, **std)
        case "rloo":
            values = rloo(rewards)
        case "remax":
            if group.baseline is None:
                raise SlimxError(f"group {group.id} has no greedy rollout, the baseline of algorithm.advantages=remax")
            values = remax(rewards, group.baseline)
        case "gdpo":
            values = gdpo(_parts(rollouts), algorithm.reward_weights, eps=algorithm.advantage_eps)
        case _:
            raise AssertionError(f"no estimator is called {algorithm.advantages}")
    by_rollout = dict(zip(rollouts, values.tolist(), strict=True))
    out: list[float | np.ndarray] = [by_rollout[trajectory.rollout_id] for trajectory in group.trajectories]
    if algorithm.advantages == "gigpo":
        steps = step_advantages(group.trajectories, gamma=algorithm.gamma, **std)
        out = [whole + algorithm.step_coef * step for whole, step in zip(out, steps, strict=True)]
    return out


def all_advantages(algorithm: Algorithm, groups: Sequence[Group]) -> list[float | np.ndarray]:
    """`group_advantages` of every trajectory of a step, group after group; GDPO's are normalised over its rollouts."""
    values = [value for group in groups for value in group_advantages(algorithm, group)]
    if algorithm.advantages != "gdpo" or not algorithm.whiten:
        return values
    names = [(group.id, trajectory.rollout_id) for group in groups for trajectory in group.trajectories]
    by_rollout = dict(zip(names, values, strict=True))
    normal = dict(zip(by_rollout, standardise(np.array(list(by_rollout.values()))).tolist(), strict=True))
    return [normal[name] for name in names]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
                    "with the same names for every trajectory of a prompt"
                )
    return {name: [_mean([each.reward_parts[name] for each in m]) for m in rollouts.values()] for name in names}
