"""The generate hook of preference learning from a file (`algorithm.name: dpo` without engines): of each prompt `answer`
is the chosen answer and `metadata.rejected` the rejected one; rollout 0 is the first, rollout 1 the second."""

from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.rollout.hooks import RolloutContext


async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """The prompt followed by one of its two answers and the end token, all of the answer trained; reward 1 or 0."""
    rejected = prompt.metadata.get("rejected")
    if prompt.answer is None or not isinstance(rejected, str):
        raise SlimxError(
            f"prompt {prompt.id} is no pair: give the chosen answer as answer, the rejected one as metadata.rejected",
            code="hooks.pair",
            about=prompt.id,
        )
    draft = ctx.draft(prompt)
    text = prompt.answer if ctx.index == 0 else rejected
    answer = ctx.tokenizer(text, add_special_tokens=False).input_ids
    draft.add_inserted([*answer, ctx.tokenizer.eos_token_id], train=True)
    trajectory = draft.finish()
    trajectory.reward = float(ctx.index == 0)
    return trajectory
