"""Generate hook with two agents of one policy: each answers, reads the other agent's answer, and answers again.

    slimx train FILE rollout.generate=examples.debate.generate

A rollout returns two trajectories, one per agent. Both are trained, each with the reward of its own final answer. They
have the same rollout id, so that the group's statistics count the debate once.
"""

import asyncio

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RolloutContext

AGENTS = 2


async def generate(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """Generates a debate of two rounds, and returns the trajectory of each agent."""
    drafts = [ctx.draft(prompt, suffix=f"-agent{agent}") for agent in range(AGENTS)]
    answers = ["" for _ in drafts]
    for round_ in range(2):
        if round_:
            for agent, draft in enumerate(drafts):
                other = answers[1 - agent]
                draft.add_inserted(ctx.turn(f"Another answer: {other}\nYour final answer:", after=draft.token_ids))
        # Each request of a rollout has a different number, so that no two agents sample with the same seed.
        completions = await asyncio.gather(
            *(ctx.engine.generate(draft.token_ids, turn=AGENTS * round_ + agent) for agent, draft in enumerate(drafts))
        )
        for agent, (draft, completion) in enumerate(zip(drafts, completions, strict=True)):
            draft.add_sampled(completion)
            answers[agent] = ctx.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        if any(completion.finish_reason != "stop" for completion in completions):
            break  # no turn can follow an answer that was cut off
    return [draft.finish(metadata={"answer": answers[agent]}) for agent, draft in enumerate(drafts)]
