"""Credit by influence, for policies that speak one after another: a reward also counts what came before it in the
rollout.

    slimx train FILE algorithm.credit=examples.influence.quality

The formulas are those of MARTI's chain of agents (github.com/TsinghuaC3I/MARTI, marti/verifiers/auto_reward_alloc.py,
commit 0a9dca8). With R the reward of a trajectory, and Q the mean reward of those of its rollout that came before it:

    quality    R + ALPHA * (Q * R - (1 - Q) * (1 - R))      agreement with what came before, for rewards in [0, 1]
    margin     R + ALPHA * (R - Q)                          improvement over what came before

The first trajectory of a rollout keeps its reward.
"""

from __future__ import annotations

from collections.abc import Callable

from slimx.data.records import Group

ALPHA = 0.5


def quality(group: Group) -> list[float]:
    """Rewards that follow the quality of what came before."""
    return _chained(group, lambda reward, before: before * reward - (1 - before) * (1 - reward))


def margin(group: Group) -> list[float]:
    """Rewards that follow the improvement over what came before."""
    return _chained(group, lambda reward, before: reward - before)


def _chained(group: Group, influence: Callable[[float, float], float]) -> list[float]:
    seen: dict[str, list[float]] = {}
    out = []
    for trajectory in group.trajectories:  # of a rollout in the order in which the hook returned them
        earlier = seen.setdefault(trajectory.rollout_id, [])
        reward = trajectory.reward
        shaped = reward + ALPHA * influence(reward, sum(earlier) / len(earlier)) if earlier else reward
        out.append(shaped)
        earlier.append(reward)
    return out
