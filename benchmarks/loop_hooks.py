"""The hooks of benchmarks/loop.py: single-turn generation of a fixed number of tokens, and a reward that varies."""

from __future__ import annotations

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext

FIXED_LENGTH = {"ignore_eos": True}
"""Sampling parameter with which both sides sample exactly `max_new_tokens` tokens per request."""


async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Generates as `single_turn` does, without stopping at an end token."""
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, FIXED_LENGTH))
    return draft.finish()


async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns the fraction of digits. Random weights give the rollouts of a group different rewards, so that no
    gradient is zero."""
    return sum(character.isdigit() for character in ctx.text) / max(1, len(ctx.text))
