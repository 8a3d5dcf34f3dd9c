"""Credit assignment: distribution of a rollout's rewards among the trajectories of its policies and roles.

def credit(group: Group) -> list[float]     # one reward per trajectory of the group, in order
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

from slimx.algorithms.advantages.group import mean, reward_of
from slimx.config.sections.algorithm import CREDITS
from slimx.data.records import Group
from slimx.dotted import load_function
from slimx.errors import SlimxError

Credit = Callable[[Group], Sequence[float | None]]


def load_credit(name: str) -> Credit:
    """Returns the function that `algorithm.credit` names. If it is a user's hook, each of its results is checked.
    Raises SlimxError for a hook that cannot be called."""
    if name == "own":
        return lambda group: [trajectory.reward for trajectory in group.trajectories]
    if name == "shared":
        return shared
    hook = load_function("algorithm.credit", name, ("group",), is_async=False)

    def checked(group: Group) -> list[float]:
        result = hook(group)
        complete = isinstance(result, Sequence) and len(result) == len(group.trajectories)
        if not complete or not all(isinstance(value, int | float) and math.isfinite(value) for value in result):
            raise SlimxError(
                f"algorithm.credit: {name} returned {result!r:.80} for the {len(group.trajectories)} trajectories of "
                f"group {group.id}; return a list with one finite reward per trajectory",
                code="hook.credit_result",
                about=name,
            )
        return [float(value) for value in result]

    return checked


def shared(group: Group) -> list[float]:
    """Returns, for every trajectory of any policy, the mean reward of the trajectory's rollout."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in group.trajectories:
        rewards[trajectory.rollout_id].append(reward_of(trajectory))
    return [mean(rewards[trajectory.rollout_id]) for trajectory in group.trajectories]


def credited(groups: Sequence[Group], name: str) -> Sequence[Group]:
    """Returns copies of `groups` whose trajectories have the rewards that the credit function `name` assigns
    (`algorithm.credit`). Returns the groups themselves if each trajectory keeps its reward."""
    if name == CREDITS[0]:
        return groups
    credit = load_credit(name)
    out = []
    for group in groups:
        trajectories = [copy(trajectory) for trajectory in group.trajectories]
        for trajectory, reward in zip(trajectories, credit(group), strict=True):
            trajectory.reward = reward
        out.append(replace(group, trajectories=trajectories))
    return out
