"""The part of a reward context that the reward hooks of slimx read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from slimx.data.records import Prompt
from slimx.errors import SlimxError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


type Engines = Mapping[str, Any]
"""Clients of frozen models by the name of their group. An extra defines their class, and hooks call its methods."""


class Context(Protocol):
    """A part of `slimx.rollout.hooks.RewardContext`."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def text(self) -> str:
        """The sampled tokens of the trajectory as text, without special tokens, with a line break between turns."""
        ...

    @property
    def final_answer(self) -> str:
        """End of the last turn, after its thinking: the text that is graded."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def engines(self) -> Engines:
        """Frozen models by the name of their group."""
        ...

    def log(self, name: str, value: float) -> None:
        """Logs a number of this call as a metric."""
        ...


def answer_of(ctx: Context, hook: str) -> str:
    """Returns the prompt's answer. Raises SlimxError for a prompt without one: a reward of 0 would hide that."""
    if ctx.prompt.answer is None:
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has no answer for {hook} to compare with; add `answer` to its line or choose "
            "another reward.function",
            code="reward.answer",
            about=ctx.prompt.id,
        )
    return ctx.prompt.answer
