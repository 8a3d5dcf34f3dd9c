"""Generate hook with two turns: after a wrong answer the model gets a hint, and answers again.

Copy this file into your own project and name its function in the configuration, or on the command line:

    slimx train configs/moe/quickstart.yaml run.dir=runs/two-turn rollout.generate=examples.two_turn.generate \
        reward.function=examples.two_turn.reward

A rollout is one trajectory: prompt, first answer, hint, second answer. Both answers are trained, the hint is not. The
first answer keeps its sampled tokens; only the hint is tokenized.
"""

from typing import Any

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext

HINT = "Try again."


async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Samples an answer and, if it is wrong, a second one after the hint."""
    draft = ctx.draft(prompt)
    first = await ctx.engine.generate(draft.token_ids, turn=0)
    draft.add_sampled(first)
    answer = text(ctx.tokenizer, first.token_ids.tolist())
    # There is no second attempt after an answer that was cut off, because no turn can follow it.
    if is_right(answer, prompt) or first.finish_reason != "stop":
        return draft.finish(metadata={"answer": answer, "turns": 1})

    draft.add_inserted(ctx.turn(HINT, after=draft.token_ids))
    # The turns have different numbers, and therefore different seeds; with the same seed the model might repeat itself.
    second = await ctx.engine.generate(draft.token_ids, turn=1)
    draft.add_sampled(second)
    answer = text(ctx.tokenizer, second.token_ids.tolist())
    return draft.finish(metadata={"answer": answer, "turns": 2})


async def reward(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    """Returns the parts of the reward, whose sum is 1 for a correct answer, 0.5 for one after the hint, else 0."""
    right = float(is_right(trajectory.metadata["answer"], ctx.prompt))
    late = float(trajectory.metadata["turns"] == 2)
    return {"right": right, "late": -0.5 * right * late}


def is_right(answer: str, prompt: Prompt) -> bool:
    """Returns True if the text of the answer equals the prompt's answer."""
    return answer == (prompt.answer or "").strip()


def text(tokenizer: Any, token_ids: list[int]) -> str:
    """Decodes token ids, without special tokens or surrounding white space."""
    return tokenizer.decode(token_ids, skip_special_tokens=True).strip()
