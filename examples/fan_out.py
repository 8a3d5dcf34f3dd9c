"""Generate hook with sub-agents: each works on the prompt alone, then the main agent answers with the help of their
notes.

    slimx train FILE rollout.generate=examples.fan_out.generate rollout.options.agents=3

Every sub-agent's trajectory is trained with the reward of the main answer, which all trajectories have in their
metadata for the reward hook below.
"""

import asyncio

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext


async def generate(ctx: RolloutContext, prompt: Prompt, *, agents: int = 2) -> list[Trajectory]:
    """Returns the trajectories of `agents` sub-agents, followed by that of the main agent."""
    drafts = [ctx.draft(prompt, suffix=f"-sub{agent}") for agent in range(agents)]
    notes = await asyncio.gather(
        *(ctx.engine.generate(draft.token_ids, turn=agent) for agent, draft in enumerate(drafts))
    )
    for draft, note in zip(drafts, notes, strict=True):
        draft.add_sampled(note)
    read = [ctx.tokenizer.decode(note.token_ids.tolist(), skip_special_tokens=True).strip() for note in notes]
    main = ctx.draft(
        Prompt(
            id=prompt.id,
            messages=[
                *(prompt.messages or []),
                {"role": "assistant", "content": "I have asked others."},
                {"role": "user", "content": "Their notes:\n" + "\n".join(read)},
            ],
        )
    )
    final = await ctx.engine.generate(main.token_ids, turn=agents)
    main.add_sampled(final)
    answer = ctx.tokenizer.decode(final.token_ids.tolist(), skip_special_tokens=True)
    return [draft.finish(metadata={"final": answer}) for draft in (*drafts, main)]


async def reward(ctx: RewardContext, trajectory: Trajectory) -> float:
    """Returns the reward of the main answer, the same for the trajectories of all agents."""
    return float(trajectory.metadata["final"].strip() == (ctx.prompt.answer or "").strip())
