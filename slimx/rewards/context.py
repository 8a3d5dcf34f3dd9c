"""The part of a reward context that the reward hooks of this room read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from slimx.data.records import Prompt
from slimx.errors import SlimxError


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
        """The end of the last turn, behind its thinking: the text that is graded."""
        ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def engines(self) -> Mapping[str, Any]:
        """Frozen models by their group's name."""
        ...

    def log(self, name: str, value: float) -> None:
        """Log a number of this call, which becomes a curve."""
        ...


def answer_of(ctx: Context, hook: str) -> str:
    """The prompt's answer. Raises SlimxError for a prompt without one: 0 for each of its rollouts would hide that."""
    if ctx.prompt.answer is None:
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has no answer for {hook} to compare with; add `answer` to its line or choose "
            "another reward.function",
            code="reward.answer",
            about=ctx.prompt.id,
        )
    return ctx.prompt.answer
