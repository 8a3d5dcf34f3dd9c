"""The default generate hook: one prompt, one completion."""

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RolloutContext


async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Samples one completion for the prompt."""
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, images=draft.images))
    return draft.finish()
