"""Hooks of the soak's run: a reward that random weights can earn, and a filter that drops some groups."""

from __future__ import annotations

from slimx.data.records import Group, Trajectory
from slimx.rollout.hooks import RewardContext

DROPPED_IN = 8
"""The filter drops about one group in this many."""


async def digits(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns the fraction of digits in the answer. Answers of random weights differ in it, so that most steps have a
    gradient."""
    return sum(character.isdigit() for character in ctx.text) / max(1, len(ctx.text))


def keep(group: Group) -> bool | str:
    """Drops groups by the seed of their first rollout, so that a repeated group has the same fate."""
    return "unlucky" if group.trajectories[0].sampling["seed"] % DROPPED_IN == 0 else True
