"""Generate hook to start from: one prompt, one answer.

Copy this file into your own project and name its function in the configuration, or on the command line:

    slimx train configs/moe/quickstart.yaml run.dir=runs/mine rollout.generate=examples.single_turn.generate

The path is an ordinary import path; the directory in which `slimx` is started is on Python's search path. Before the
run starts, slimx checks that the hook can be imported and takes (ctx, prompt).
"""

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RolloutContext


async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Generates one rollout. slimx calls this function `rollout.group_size` times per prompt, many at a time."""
    # A draft is an unfinished trajectory. It starts with the prompt's tokens, rendered by the model's chat template.
    draft = ctx.draft(prompt)

    # An engine continues these tokens. Sampling parameters come from `rollout.sampling`; a dict overrides some of them:
    #     await ctx.engine.generate(draft.token_ids, {"max_new_tokens": 32})
    completion = await ctx.engine.generate(draft.token_ids)

    # The completion contains the sampled ids with their log-probs, the weight versions that sampled them and, for an
    # MoE model, the experts of every token. The ids are added unchanged: never tokenize decoded text again.
    draft.add_sampled(completion)

    # The finished trajectory is passed to the reward hook. Its `metadata` is also saved in checkpoints.
    return draft.finish(metadata={"answer_tokens": len(completion.token_ids)})
