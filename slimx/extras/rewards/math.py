"""Reward for mathematical tasks: 1 if the final value in the response equals the prompt's answer, as judged by
math-verify, else 0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from sympy import I

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.rewards.shared.boxes import boxes, tagged
from slimx.extras.rewards.shared.notation import DELIMITED, depth, expression, last_boxes, latex
from slimx.extras.rewards.shared.verification import in_time, parse, verify
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import needs_answer, needs_process

SECONDS = 5
"""Maximum CPU seconds for parsing a response, and likewise for comparing it with the answer."""
DEEPEST = 100
"""Maximum nesting depth of brackets in a response; with thousands of levels, parsing takes minutes."""
ANSWER_SECONDS = 60
"""Maximum CPU seconds for parsing a prompt's answer. The first call in a process builds math-verify's grammar, which
takes longer than `SECONDS`, and a timeout would reject the prompt."""


@needs_process
@needs_answer
async def reward(ctx: Context, trajectory: Trajectory) -> float:
    """Returns 1.0 if the last value in the final answer (boxed, in LaTeX, or plain) equals the prompt's answer, else
    0.0. If the final answer contains <answer>, only the text between the last <answer> and its </answer> counts. A
    value that cannot be compared within 5 s counts as wrong.

    Raises SlimxError if the prompt's answer is missing or not a mathematical expression."""
    gold = _gold(answer_of(ctx, __name__))
    if not gold:
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has the answer {ctx.prompt.answer!r}, in which math-verify finds no value; set "
            "the answer to a number or a LaTeX expression, or choose another reward.function",
            code="reward.answer",
            about=ctx.prompt.id,
        )
    # parse and verify count failures and timeouts as wrong answers.
    stated = in_time(lambda: _stated(latex(tagged(ctx.final_answer))), SECONDS)
    if not stated or depth(stated) > DEEPEST:
        return 0.0
    predicted = parse(stated, seconds=SECONDS)
    sides = in_time(lambda: (_complex(gold), _complex(predicted)), SECONDS)
    if sides is None:
        return 0.0
    return float(verify(*sides, seconds=SECONDS))


@cache
def _gold(answer: str) -> tuple[Any, ...]:
    r"""Returns the values that the prompt's answer may mean. An expression is put between dollar signs, because outside
    dollar signs math-verify looks only for numbers, and finds 2 in `2\pi`. In an answer that contains words, only the
    numbers count."""
    answer = latex(answer)
    boxed = last_boxes(answer, boxes(answer))
    if boxed:
        answer = boxed
    elif not DELIMITED.search(answer):
        answer = expression(answer) or answer
    return tuple(parse(answer, seconds=ANSWER_SECONDS))


def _complex(values: Iterable[Any]) -> list[Any]:
    """Replaces the symbol i in the values with the imaginary unit, because math-verify only assumes that i is not real.
    Answer and response are treated alike, so an i that is an index remains equal to itself."""
    replaced = []
    for value in values:
        letters = [symbol for symbol in getattr(value, "free_symbols", ()) if symbol.name == "i"]
        replaced.append(value.subs(dict.fromkeys(letters, I)) if letters else value)
    return replaced


def _stated(text: str) -> str:
    """Returns the part of a response that math-verify reads. This is the last box, or "" if that box is unclosed.
    Without a box, or if "final answer is" follows the last box, it is the whole text if this contains delimited
    mathematics. Otherwise it is the expression in the last line, possibly after "answer is", "answer:" or a word such
    as "so", or the whole text if there is no such expression."""
    in_boxes = boxes(text)
    if in_boxes and not re.search("(?i)final answer is", text[in_boxes[-1].stop :]):
        return last_boxes(text, in_boxes) or ""
    if DELIMITED.search(text):
        return text
    last_line = text.strip().rpartition("\n")[2].replace("**", "")
    parts = re.split(r"(?i:answer)(?:\s+is)?\s*:?\s*|(?i:therefore|thus|hence|so)\s*,?\s*", last_line)
    return expression(parts[-1].rstrip(". ")) or text
