"""From the configuration's algorithm to its loss and advantages."""

from __future__ import annotations

from slimx.algorithms.advantages import grpo
from slimx.algorithms.losses import Loss, policy_loss, sft_loss
from slimx.config.algorithm import Algorithm
from slimx.data.records import Group


def make_loss(algorithm: Algorithm) -> Loss:
    """The loss function of a configured algorithm."""
    if algorithm.name == "sft":
        return sft_loss
    return policy_loss(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, kl_coef=algorithm.kl_coef)


def group_advantages(algorithm: Algorithm, group: Group) -> list[float]:
    """One advantage per trajectory of `group`, in order. For PPO all are 0: a critic's come later, token by token
    (slimx.algorithms.ppo).

    A rollout counts once, however many trajectories it returned: its reward is their mean, and they share its
    advantage."""
    if algorithm.name == "sft":
        return [1.0] * len(group.trajectories)
    if algorithm.name == "ppo":
        return [0.0] * len(group.trajectories)
    rewards: dict[str, list[float]] = {}
    for trajectory in group.trajectories:
        rewards.setdefault(trajectory.rollout_id, []).append(trajectory.reward)
    means = [sum(values) / len(values) for values in rewards.values()]
    values = grpo(means, normalize_std=algorithm.normalize_std, eps=algorithm.advantage_eps)
    by_rollout = dict(zip(rewards, values.tolist(), strict=True))
    return [by_rollout[trajectory.rollout_id] for trajectory in group.trajectories]
