"""The generate hook of benchmarks/rollout_skew.py: one answer in sixteen is ten times as long."""

from __future__ import annotations

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RolloutContext

SHORT, SKEW, EVERY = 24, 10, 16
"""Tokens of most answers, length of a long one relative to them, and one in how many is long."""


async def skewed(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Samples a number of tokens that depends on the rollout's seed, ignoring end tokens."""
    draft = ctx.draft(prompt)
    length = SHORT * (SKEW if ctx.seed % EVERY == 0 else 1)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, {"ignore_eos": True, "max_new_tokens": length}))
    return draft.finish()
