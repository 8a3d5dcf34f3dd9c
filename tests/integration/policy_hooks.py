"""Hooks of runs that train several policies."""

from __future__ import annotations

import asyncio
from pathlib import Path

from slimx.data.records import Group, Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext
from tests.integration.hooks import digits


async def answered_and_judged(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """Lets the policy `actor` answer and the role `judge` continue its answer. Version 2 does not while there is a file
    that the prompt's `hold` names."""
    while ctx.version == 2 and Path(prompt.metadata.get("hold", "")).is_file():
        await asyncio.sleep(0.05)
    answer = ctx.draft(prompt)
    answer.add_sampled(await ctx.engine.generate(answer.token_ids))
    judge = ctx.policies["judge"]
    verdict = judge.draft(answer.token_ids, suffix="-judge")
    verdict.add_sampled(await judge.engine.generate(verdict.token_ids, turn=1))
    return [answer.finish(), verdict.finish()]


async def answered_twice(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """Returns what `answered_and_judged` does where both roles are the policy `actor`, by that policy alone."""
    answer = ctx.draft(prompt)
    answer.add_sampled(await ctx.engine.generate(answer.token_ids))
    verdict = ctx.draft(answer.token_ids, suffix="-judge")
    verdict.add_sampled(await ctx.engine.generate(verdict.token_ids, turn=1))
    return [answer.finish(), verdict.finish()]


async def opposed(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns `digits` for the policy `actor`, its opposite for others: their weights diverge at once."""
    share = await digits(ctx, trajectory)
    return share if trajectory.policy == "actor" else 1.0 - share


async def taking_sides(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Gives the other policy 1 minus the reward of the policy `actor`."""
    share = float(trajectory.index % 2)
    return share if trajectory.policy == "actor" else 1.0 - share


def to_the_judge(group: Group) -> list[float]:
    """Gives credit to the policy `judge` alone."""
    return [trajectory.reward if trajectory.policy == "judge" else 0.0 for trajectory in group.trajectories]


async def digits_or_letters(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns `digits` for the policy `actor`, the share of small letters for others."""
    if trajectory.policy == "actor":
        return await digits(ctx, trajectory)
    return sum("a" <= character <= "z" for character in ctx.text) / max(1, len(ctx.text))
