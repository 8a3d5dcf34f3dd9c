"""The reward of mathematical tasks: 1 if the response ends in a value equal to the answer, by math-verify."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from math_verify import parse, verify

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import needs_process

SECONDS = 5
"""For parsing a response, and again for comparing it."""


@needs_process
async def reward(ctx: Context, trajectory: Trajectory) -> float:
    """1.0 if the value that the text states last (boxed, in LaTeX, or plain) equals the prompt's answer, else 0.0; an
    expression that cannot be compared within 5 s counts as wrong.

    Raises SlimxError for a prompt whose answer is missing or no mathematical expression."""
    gold = _gold(answer_of(ctx, __name__))
    if not gold:
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has the answer {ctx.prompt.answer!r}, in which math-verify finds no value; give "
            "a number or a LaTeX expression, or choose another reward.function"
        )
    # Both take what they cannot do, or not in time, for wrong.
    said = parse(ctx.text, parsing_timeout=SECONDS)
    return float(verify(list(gold), said, timeout_seconds=SECONDS))


@cache
def _gold(answer: str) -> tuple[Any, ...]:
    """What the answer can mean; a bare LaTeX expression is read as if it stood between dollar signs. Words alone would
    be read as a product of letters."""
    return tuple(parse(answer) or (parse(f"${answer}$") if re.search(r"[\\\d^_=(+*/-]", answer) else ()))
