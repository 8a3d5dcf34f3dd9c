"""Reward for tasks with one correct answer: 1 if the final answer equals the prompt's answer, else 0."""

from __future__ import annotations

from slimx.data.records import Trajectory
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import needs_answer


@needs_answer
async def reward(ctx: Context, trajectory: Trajectory) -> float:
    """Returns 1.0 if the final answer equals the prompt's answer, ignoring surrounding white space, else 0.0. Raises
    SlimxError if the prompt has no answer."""
    return float(ctx.final_answer.strip() == answer_of(ctx, __name__).strip())
