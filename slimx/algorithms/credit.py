"""Credit: how the rewards of a rollout's trajectories are shared out among the policies and roles that made it.

def credit(group: Group) -> list[float]     # one reward per trajectory of the group, in order
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from slimx.algorithms.advantages.group import mean
from slimx.config.sections.algorithm import CREDITS
from slimx.data.records import Group
from slimx.dotted import load_function
from slimx.errors import SlimxError

Credit = Callable[[Group], list[float]]


def load_credit(name: str) -> Credit:
    """The way of `algorithm.credit`, whose results are checked at every call. Raises SlimxError for a hook that cannot
    be called."""
    if name == "own":
        return lambda group: [trajectory.reward for trajectory in group.trajectories]
    if name == "shared":
        return shared
    hook = load_function("algorithm.credit", name, ("group",), is_async=False)

    def checked(group: Group) -> list[float]:
        result = hook(group)
        whole = isinstance(result, Sequence) and len(result) == len(group.trajectories)
        if not whole or not all(isinstance(value, int | float) and math.isfinite(value) for value in result):
            raise SlimxError(
                f"algorithm.credit: {name} returned {result!r:.80} for the {len(group.trajectories)} trajectories of "
                f"group {group.id}; return a list with a finite reward for each",
                code="hook.credit_result",
                about=name,
            )
        return [float(value) for value in result]

    return checked


def shared(group: Group) -> list[float]:
    """The mean reward of its rollout for every trajectory, whatever policy it is of."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in group.trajectories:
        rewards[trajectory.rollout_id].append(trajectory.reward)
    return [mean(rewards[each.rollout_id]) for each in group.trajectories]


def credited(groups: Sequence[Group], name: str) -> Sequence[Group]:
    """Copies of `groups` in which every trajectory has the reward that `algorithm.credit` gives it; the groups
    themselves where each keeps its own."""
    if name == CREDITS[0]:
        return groups
    credit = load_credit(name)
    return [
        replace(
            group,
            trajectories=[
                replace(trajectory, reward=reward)
                for trajectory, reward in zip(group.trajectories, credit(group), strict=True)
            ],
        )
        for group in groups
    ]
