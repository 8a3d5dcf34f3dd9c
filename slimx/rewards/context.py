"""The part of a reward context that the reward hooks of slimx read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from slimx.data.records import Prompt
from slimx.errors import SlimxError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


type Engines = Mapping[str, Any]
"""Clients of frozen models by the name of their engine group. The class of the clients is defined by
`slimx.extras.served_models`."""


class Context(Protocol):
    """Interface to the part of `slimx.rollout.hooks.RewardContext` that slimx's built-in reward hooks use."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def text(self) -> str:
        """Text of the trajectory's sampled tokens, without special tokens and with a line break between turns."""

    @property
    def final_answer(self) -> str:
        """Text that is graded: the last turn's text after its thinking block; "" if the thinking block was not
        closed."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def engines(self) -> Engines:
        """Clients of the frozen models, by the name of the engine group."""

    def log(self, name: str, value: float) -> None:
        """Logs a number, at most once per name and hook call. The number becomes a metric of the trajectory."""


def answer_of(ctx: Context, hook: str) -> str:
    """Returns the prompt's answer.

    Raises SlimxError for a prompt without an answer, because a reward of 0 would hide the problem. `hook`: name of the
    reward hook, for the message.
    """
    if ctx.prompt.answer is None:
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has no answer with which {hook} can compare completions; add `answer` to the "
            "prompt's line, or choose another reward.function",
            code="reward.answer",
            about=ctx.prompt.id,
        )
    return ctx.prompt.answer
