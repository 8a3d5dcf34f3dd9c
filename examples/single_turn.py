"""A generate hook to start from: one prompt, one answer.

Copy this file into your own project and name its function in the configuration, or on the command line:

    slimx train configs/moe/quickstart.yaml run.dir=runs/mine rollout.generate=examples.single_turn.generate

The path is an ordinary import path; the directory where `slimx` is started is on it. slimx checks before the run starts
that the hook can be imported and takes (ctx, prompt).
"""

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RolloutContext


async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """One rollout. slimx calls this `rollout.group_size` times for each prompt, many calls at once."""
    # A draft is the trajectory in the making. It begins with the prompt's tokens in the model's chat template.
    draft = ctx.draft(prompt)

    # Ask an engine to continue them. Sampling parameters come from `rollout.sampling`; override single ones by a dict:
    #     await ctx.engine.generate(draft.token_ids, {"max_new_tokens": 32})
    completion = await ctx.engine.generate(draft.token_ids)

    # The completion carries the sampled ids with their log-probs, the weight versions that sampled them and, for an MoE
    # model, the experts of every token. The ids go into the draft as they are: text is for reading, never a way back.
    draft.add_sampled(completion)

    # The finished trajectory goes to the reward hook. `metadata` is kept with it, in checkpoints too.
    return draft.finish(metadata={"answer_tokens": len(completion.token_ids)})
