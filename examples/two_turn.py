"""A generate hook with two turns: an answer that is wrong is met by a hint, and the model answers again.

Copy this file into your own project and name its function in the configuration, or on the command line:

    slimx train configs/moe/quickstart.yaml run.dir=runs/two-turn rollout.generate=examples.two_turn.generate \
        reward.function=examples.two_turn.reward

A rollout is one trajectory: prompt, first answer, hint, second answer. Both answers are trained, the hint is not. The
first answer stays as it was sampled, token by token; only the hint is made from text.
"""

from typing import Any

from slimx.data.records import Prompt, Trajectory
from slimx.rollout.hooks import RewardContext, RolloutContext

HINT = "Try again."


async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Sample an answer and, if it is wrong, one more after the hint."""
    draft = ctx.draft(prompt)
    first = await ctx.engine.generate(draft.token_ids, turn=0)
    draft.add_sampled(first)
    answer = text(ctx.tokenizer, first.token_ids.tolist())
    # An answer that was cut off has no end to put a turn after, so there is no second try for it.
    if is_right(answer, prompt) or first.finish_reason != "stop":
        return draft.finish(metadata={"answer": answer, "turns": 1})

    draft.add_inserted(ctx.turn(HINT, after=draft.token_ids))
    # Each turn has its number, so that its seed differs: with the same seed the model would say the same again.
    second = await ctx.engine.generate(draft.token_ids, turn=1)
    draft.add_sampled(second)
    answer = text(ctx.tokenizer, second.token_ids.tolist())
    return draft.finish(metadata={"answer": answer, "turns": 2})


async def reward(ctx: RewardContext, trajectory: Trajectory) -> dict[str, float]:
    """1 for a right answer, 0.5 for one that needed the hint: the reward is the sum of the parts."""
    right = float(is_right(trajectory.metadata["answer"], ctx.prompt))
    late = float(trajectory.metadata["turns"] == 2)
    return {"right": right, "late": -0.5 * right * late}


def is_right(answer: str, prompt: Prompt) -> bool:
    """True if the answer's text is the prompt's."""
    return answer == (prompt.answer or "").strip()


def text(tokenizer: Any, token_ids: list[int]) -> str:
    """Sampled ids to read, without special tokens."""
    return tokenizer.decode(token_ids, skip_special_tokens=True).strip()
