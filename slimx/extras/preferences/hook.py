"""The generate hook of preference learning from a file (`algorithm.name: bradley_terry`, or `dpo` without engines).

A prompt's `answer` is the chosen answer and `metadata.rejected` the rejected one; rollout 0 is the chosen, rollout 1
the rejected one. `metadata.margin` is the score difference that a reward model must learn."""

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
    """Raises SlimxError for a prompt that is not a pair, or has an answer that `encode_answer` refuses."""
    for prompt in prompts:
        check_pair(prompt)
        for answer in (prompt.answer or "", prompt.metadata["rejected"]):
            check_answer(tokenizer, prompt, answer)


@checks_prompts(check)
async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Returns the prompt followed by one of its two answers as the chat template renders it, the whole answer trained;
    reward 1 or 0."""
    check_pair(prompt)
    draft = ctx.draft(prompt)
    text = (prompt.answer or "") if ctx.index == 0 else prompt.metadata["rejected"]
    draft.add_inserted(encode_answer(ctx.tokenizer, prompt, text), train=True)
    trajectory = draft.finish()
    trajectory.reward = float(ctx.index == 0)
    return trajectory


def check_pair(prompt: Prompt) -> None:
    """Raises SlimxError unless `prompt` has two different answers, and a margin that is a number if it has one."""
    rejected = prompt.metadata.get("rejected")
    if prompt.answer is None or not isinstance(rejected, str) or prompt.answer == rejected:
        raise SlimxError(
            f"prompt {prompt.id} is not a pair: give the chosen answer as answer, and another text, the rejected one, "
            "as metadata.rejected",
            code="hooks.pair",
            about=prompt.id,
        )
    margin = prompt.metadata.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise SlimxError(
            f"prompt {prompt.id} has the metadata.margin {margin!r}; give a number, or leave it out",
            code="hooks.margin",
            about=prompt.id,
        )
