"""Credit assignment for policies that act one after another: a trajectory's reward also depends on the rewards of the
earlier trajectories of its rollout.

    slimx train FILE algorithm.credit=examples.influence.quality

The formulas are those of MARTI's chain of agents (github.com/TsinghuaC3I/MARTI, marti/verifiers/auto_reward_alloc.py,
commit 0a9dca8). With R the reward of a trajectory, and Q the mean reward of the earlier trajectories of its rollout:

    quality    R + ALPHA * (Q * R - (1 - Q) * (1 - R))      agreement with the earlier rewards, which must be in [0, 1]
    margin     R + ALPHA * (R - Q)                          improvement over the earlier rewards

The first trajectory of a rollout keeps its reward.
"""

from __future__ import annotations

from collections.abc import Callable

from slimx.data.records import Group

ALPHA = 0.5


def quality(group: Group) -> list[float]:
    """Returns a reward per trajectory, shaped by its agreement with the earlier rewards of its rollout."""
    return _chained(group, lambda reward, before: before * reward - (1 - before) * (1 - reward))


def margin(group: Group) -> list[float]:
    """Returns a reward per trajectory, shaped by its improvement over the earlier rewards of its rollout."""
    return _chained(group, lambda reward, before: reward - before)


def _chained(group: Group, influence: Callable[[float, float], float]) -> list[float]:
    seen: dict[str, list[float]] = {}
    out = []
    for trajectory in group.trajectories:  # trajectories of a rollout are in the order of the hook's result
        earlier = seen.setdefault(trajectory.rollout_id, [])
        reward = trajectory.reward
        shaped = reward + ALPHA * influence(reward, sum(earlier) / len(earlier)) if earlier else reward
        out.append(shaped)
        earlier.append(reward)
    return out
