"""The reward of mathematical tasks: 1 if the response ends in a value equal to the answer, by math-verify."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from sympy import I

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.rewards.shared.boxes import boxes
from slimx.extras.rewards.shared.notation import DELIMITED, depth, expression, last_boxes, latex
from slimx.extras.rewards.shared.verification import in_time, parse, verify
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import needs_answer, needs_process

SECONDS = 5
"""CPU seconds for parsing a response, and again for comparing it."""
DEEPEST = 100
"""Brackets inside one another that a response may have: at thousands the grammar computes for minutes."""
ANSWER_SECONDS = 60
"""CPU seconds for parsing a prompt's answer: the first one of a process waits for the library's grammar, longer than a
response may. An answer that is not read in time would refuse its prompt."""


@needs_process
@needs_answer
async def reward(ctx: Context, trajectory: Trajectory) -> float:
    """1.0 if the value that the final answer states last (boxed, in LaTeX, or plain) equals the prompt's answer,
    else 0.0; an expression that cannot be compared within 5 s counts as wrong.

    Raises SlimxError for a prompt whose answer is missing or no mathematical expression."""
    gold = _gold(answer_of(ctx, __name__))
    if not gold:
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has the answer {ctx.prompt.answer!r}, in which math-verify finds no value; give "
            "a number or a LaTeX expression, or choose another reward.function",
            code="reward.answer",
            about=ctx.prompt.id,
        )
    # parse and verify take what they cannot do, or not in time, for wrong.
    stated = in_time(lambda: _stated(latex(ctx.final_answer)), SECONDS)
    said = parse(stated, seconds=SECONDS) if stated and depth(stated) <= DEEPEST else []
    compared = in_time(lambda: (_complex(gold), _complex(said)), SECONDS)
    return float(verify(*compared, seconds=SECONDS)) if compared else 0.0


@cache
def _gold(answer: str) -> tuple[Any, ...]:
    """Values that the answer can mean. An expression is read as if it stood between dollar signs: outside them the
    library looks for numbers alone, and finds 2 in `2\\pi`. Of words, only numbers beside them count."""
    answer = latex(answer)
    given = last_boxes(answer, boxes(answer)) or (answer if DELIMITED.search(answer) else expression(answer) or answer)
    return tuple(parse(given, seconds=ANSWER_SECONDS))


def _complex(values: Iterable[Any]) -> list[Any]:
    """The values with the imaginary unit for the letter i, of which math-verify knows no more than that it is not real.
    Both sides are treated alike, so that an i that only counts stays equal to itself."""
    return [
        value.subs({symbol: I for symbol in value.free_symbols if symbol.name == "i"})
        if any(symbol.name == "i" for symbol in getattr(value, "free_symbols", ()))
        else value
        for value in values
    ]


def _stated(text: str) -> str:
    """The part of a response that math-verify shall read: its last box, nothing if that is torn; else all of it if it
    marks its mathematics; else the expression that its last line consists of, or ends in after "answer is" or
    "answer:"."""
    if (found := boxes(text)) and not re.search("(?i)final answer is", text[found[-1].stop :]):
        return last_boxes(text, found) or ""
    if DELIMITED.search(text):
        return text
    last = text.strip().rpartition("\n")[2].replace("**", "")
    said = re.split(r"(?i:answer)(?:\s+is)?\s*:?\s*|(?i:therefore|thus|hence|so)\s*,?\s*", last)[-1].rstrip(". ")
    return expression(said) or text
