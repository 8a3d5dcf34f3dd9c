"""The reward of tasks with one right answer: 1 if the final answer is the prompt's answer, else 0."""

from __future__ import annotations

from slimx.data.records import Trajectory
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import needs_answer


@needs_answer
async def reward(ctx: Context, trajectory: Trajectory) -> float:
    """1.0 if final answer and answer are equal but for white space around them, else 0.0. SlimxError: no answer."""
    return float(ctx.final_answer.strip() == answer_of(ctx, __name__).strip())
