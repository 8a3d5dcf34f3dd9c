"""Hooks that the integration tests name in their configurations."""

from __future__ import annotations

import json
from pathlib import Path

from slimx.data.records import Prompt, Trajectory
from slimx.rollout import single_turn
from slimx.rollout.hooks import RewardContext, RolloutContext


async def digits(ctx: RewardContext, trajectory: Trajectory) -> float:
    """The share of digits in the answer: random weights differ in it, so that every step has a gradient."""
    return sum(character.isdigit() for character in ctx.text) / max(1, len(ctx.text))


async def judged(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    """`digits`, and how likely a frozen model holds the tokens to be."""
    likely = await ctx.engines["judge"].logprobs(trajectory.token_ids.tolist())
    return {"digits": await digits(ctx, trajectory), "judge": sum(likely) / len(likely) / 100}


async def recording(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Single turn, and every trajectory's tokens appended to the file that the prompt names."""
    trajectory = await single_turn.generate(ctx, prompt)
    if not ctx.evaluation:
        line = {"id": trajectory.id, "tokens": trajectory.token_ids.tolist()}
        with Path(prompt.metadata["record"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return trajectory
