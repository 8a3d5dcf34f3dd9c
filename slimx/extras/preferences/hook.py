"""Generate hook that reads preference pairs from the prompt file, for `algorithm.name: bradley_terry`, and for `dpo`
without engines.

A prompt's `answer` is the chosen answer, and `metadata.rejected` is the rejected one. Rollout 0 of a group is the
chosen answer, rollout 1 the rejected one. `metadata.margin` is the difference between their scores that a reward model
must reach."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError
from slimx.extras.demonstrations.answers import check_answer, encode_answer
from slimx.rewards.needs import checks_prompts
from slimx.rollout.hooks import RolloutContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check(prompts: Iterable[Prompt], *, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises SlimxError for a prompt without a pair of different answers, with an invalid margin, or with an answer
    that `encode_answer` does not accept."""
    for prompt in prompts:
        check_pair(prompt)
        for answer in (prompt.answer or "", prompt.metadata["rejected"]):
            check_answer(tokenizer, prompt, answer)


@checks_prompts(check)
async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Returns, without sampling, the prompt followed by one of its two answers as the chat template renders it. All
    tokens of the answer are trained on. The reward is 1 for the chosen answer and 0 for the rejected one."""
    check_pair(prompt)
    draft = ctx.draft(prompt)
    text = (prompt.answer or "") if ctx.index == 0 else prompt.metadata["rejected"]
    draft.add_inserted(encode_answer(ctx.tokenizer, prompt, text), train=True)
    trajectory = draft.finish()
    trajectory.reward = float(ctx.index == 0)
    return trajectory


def check_pair(prompt: Prompt) -> None:
    """Raises SlimxError if `prompt` does not have two different answers, or if it has a margin that is not a finite
    number."""
    rejected = prompt.metadata.get("rejected")
    if prompt.answer is None or not isinstance(rejected, str) or prompt.answer == rejected:
        problem = "has no string in metadata.rejected"
        if prompt.answer is None:
            problem = "has no `answer`"
        elif prompt.answer == rejected:
            problem = "has the same text in `answer` and metadata.rejected"
        raise SlimxError(
            f"prompt {prompt.id} {problem}; set `answer` to the chosen answer, and metadata.rejected to a different "
            "answer",
            code="hooks.pair",
            about=prompt.id,
        )
    margin = prompt.metadata.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise SlimxError(
            f"prompt {prompt.id} has metadata.margin={margin!r}, which is not a finite number; set metadata.margin to "
            "a finite number, or remove metadata.margin",
            code="hooks.margin",
            about=prompt.id,
        )
