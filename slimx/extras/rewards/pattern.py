"""Reward for a required format: 1 if the response matches a regular expression, else 0."""

from __future__ import annotations

import re
from functools import cache

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import needs_process


# A regular expression may take exponential time, and `re` cannot be interrupted.
@needs_process
async def reward(ctx: Context, trajectory: Trajectory, *, pattern: str, whole: bool = False) -> float:
    """Returns 1.0 if `pattern` occurs in the response's text or, with `whole`, matches all of it; else 0.0.

    `pattern`: regular expression of Python's `re`, in which `.` also matches line breaks. If the pattern has a group
    named `answer`, that group of the last match must also be part of the final answer and equal the prompt's answer.
    Raises SlimxError if the pattern is not a regular expression."""
    expression = compiled(pattern)
    if whole:
        last_match = expression.fullmatch(ctx.text)
    else:
        last_match = None
        for match in expression.finditer(ctx.text):
            last_match = match
    if last_match is None:
        return 0.0
    if "answer" not in expression.groupindex:
        return 1.0
    if last_match.start("answer") < len(ctx.text) - len(ctx.final_answer):
        return 0.0
    return float(last_match["answer"].strip() == answer_of(ctx, __name__).strip())


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compiles `pattern`. Raises SlimxError with the reason if it is not a valid regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise SlimxError(
            f"slimx.extras.rewards.pattern: reward.options.pattern={pattern!r} is not a valid regular expression "
            f"({error}); correct the pattern (Python's module `re` documents the syntax)",
            code="reward.option",
            about="pattern",
        ) from error
