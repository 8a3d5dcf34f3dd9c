"""The generate hook of supervised fine-tuning: the prompt's `answer` is the demonstration; no engine is asked."""

from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.rollout.hooks import RolloutContext


async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """The prompt followed by its demonstrated answer and the end token, all of the answer trained."""
    if prompt.answer is None:
        raise SlimxError(
            f"prompt {prompt.id} has no answer to learn from; demonstrations need one",
            code="hooks.answer",
            about=prompt.id,
        )
    draft = ctx.draft(prompt)
    answer = ctx.tokenizer(prompt.answer, add_special_tokens=False).input_ids
    draft.add_inserted([*answer, ctx.tokenizer.eos_token_id], train=True)
    return draft.finish()
