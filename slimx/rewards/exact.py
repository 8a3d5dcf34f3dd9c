"""The reward of tasks with one right answer: 1 if the response is the prompt's answer, else 0."""

from __future__ import annotations

from typing import Protocol

from slimx.data.records import Prompt, Trajectory
from slimx.errors import SlimxError


class Context(Protocol):
    """What this reward reads of the `RewardContext` that the loop passes."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def text(self) -> str:
        """The sampled tokens of the trajectory as text, without special tokens."""
        ...


async def reward(ctx: Context, trajectory: Trajectory) -> float:
    """1.0 if text and answer are equal but for white space around them, else 0.0.

    Raises SlimxError for a prompt without an answer: 0 for each of its rollouts would hide the mistake.
    """
    if ctx.prompt.answer is None:
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has no answer for slimx.rewards.exact to compare with; "
            "add `answer` to its line or choose another reward.function"
        )
    return float(ctx.text.strip() == ctx.prompt.answer.strip())
