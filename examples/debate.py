"""A generate hook with two agents of one policy: each answers, reads the other's answer, and answers again.

    slimx train FILE rollout.generate=examples.debate.generate

One rollout returns two trajectories, one per agent: each is rewarded by its own final answer and both are trained. They
share the rollout's id, so that the group's statistics count the debate once.
"""

import asyncio

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RolloutContext

AGENTS = 2


async def generate(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """Two rounds of two agents."""
    drafts = [ctx.draft(prompt, suffix=f"-agent{agent}") for agent in range(AGENTS)]
    said = ["" for _ in drafts]
    for round_ in range(2):
        if round_:
            for agent, draft in enumerate(drafts):
                other = said[1 - agent]
                draft.add_inserted(ctx.turn(f"Another answer: {other}\nYour final answer:", after=draft.token_ids))
        # Every request of a rollout has a number of its own, so that no two agents sample with the same seed.
        completions = await asyncio.gather(
            *(ctx.engine.generate(draft.token_ids, turn=AGENTS * round_ + agent) for agent, draft in enumerate(drafts))
        )
        for agent, (draft, completion) in enumerate(zip(drafts, completions, strict=True)):
            draft.add_sampled(completion)
            said[agent] = ctx.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        if any(completion.finish_reason != "stop" for completion in completions):
            break  # an answer without an end leaves nothing to put a turn after
    return [draft.finish(metadata={"answer": said[agent]}) for agent, draft in enumerate(drafts)]
