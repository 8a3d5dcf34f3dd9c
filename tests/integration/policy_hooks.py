"""Hooks of runs that train several policies."""

from __future__ import annotations

import asyncio
from pathlib import Path

from slimx.data.records import Group, Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext
from tests.integration.hooks import digits


async def answered_and_judged(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """The policy `actor` answers, and the role `judge` continues what it said. Version 2 does not while there is a file
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
    """Return what `answered_and_judged` does where both roles are the policy `actor`, by that policy alone."""
    answer = ctx.draft(prompt)
    answer.add_sampled(await ctx.engine.generate(answer.token_ids))
    verdict = ctx.draft(answer.token_ids, suffix="-judge")
    verdict.add_sampled(await ctx.engine.generate(verdict.token_ids, turn=1))
    return [answer.finish(), verdict.finish()]


async def opposed(ctx: RewardContext, trajectory: Trajectory) -> float:
    """`digits` for the policy `actor`, its opposite for others: their weights part at once."""
    share = await digits(ctx, trajectory)
    return share if trajectory.policy == "actor" else 1.0 - share


async def taking_sides(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Whatever the policy `actor` earns in a rollout, the other one loses."""
    share = float(trajectory.index % 2)
    return share if trajectory.policy == "actor" else 1.0 - share


def to_the_judge(group: Group) -> list[float]:
    """Credit for the policy `judge` alone."""
    return [each.reward if each.policy == "judge" else 0.0 for each in group.trajectories]


async def digits_or_letters(ctx: RewardContext, trajectory: Trajectory) -> float:
    """`digits` for the policy `actor`, the share of small letters for others."""
    if trajectory.policy == "actor":
        return await digits(ctx, trajectory)
    return sum("a" <= character <= "z" for character in ctx.text) / max(1, len(ctx.text))
