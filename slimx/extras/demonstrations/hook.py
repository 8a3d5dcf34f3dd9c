"""Generate hook of supervised fine-tuning: the prompt's `answer` is the demonstration, and no engine is used."""

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
    """Raises SlimxError for a prompt without an answer, or with an answer that `encode_answer` refuses."""
    for prompt in prompts:
        check_answer(tokenizer, prompt, _answer(prompt))


@checks_prompts(check)
async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Returns a trajectory of the prompt and its answer, as the chat template renders them. All tokens of the answer
    are trained on."""
    draft = ctx.draft(prompt)
    draft.add_inserted(encode_answer(ctx.tokenizer, prompt, _answer(prompt)), train=True)
    return draft.finish()


def _answer(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise SlimxError(
            f"prompt {prompt.id} has no answer, but supervised fine-tuning learns from the answers of all prompts; add "
            "`answer` to this prompt",
            code="hooks.answer",
            about=prompt.id,
        )
    return prompt.answer
