"""The reward of a required form: 1 if a regular expression finds itself in the response."""

from __future__ import annotations

import re
from functools import cache

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import needs_process


# An expression can take exponential time on a text, and `re` cannot be interrupted.
@needs_process
async def reward(ctx: Context, trajectory: Trajectory, *, pattern: str, whole: bool = False) -> float:
    """1.0 if `pattern` (Python's `re`, `.` matches line ends) occurs in the text, or with `whole` is all of it; else
    0.0. If the pattern has a group named `answer`, what its last occurrence holds must be the prompt's answer, and must
    stand in the final answer.

    Raises SlimxError for a pattern that is no regular expression."""
    expression = compiled(pattern)
    found = [expression.fullmatch(ctx.text)] if whole else list(expression.finditer(ctx.text))
    if not found or found[-1] is None:
        return 0.0
    if "answer" not in expression.groupindex:
        return 1.0
    if found[-1].start("answer") < len(ctx.text) - len(ctx.final_answer):
        return 0.0
    return float(found[-1]["answer"].strip() == answer_of(ctx, __name__).strip())


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The expression, or a SlimxError that says what is wrong with it."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise SlimxError(
            f"slimx.extras.rewards.pattern: {pattern!r} is no regular expression ({error}); correct the option pattern",
            code="reward.option",
            about="pattern",
        ) from error
