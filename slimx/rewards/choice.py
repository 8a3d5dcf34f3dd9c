"""The reward of multiple-choice tasks: 1 if the letter that the response decides for is the prompt's answer."""

from __future__ import annotations

import re

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.rewards.needs import needs_answer
from slimx.rewards.shared.context import Context, answer_of

LETTERS = "ABCDEFGHIJ"


@needs_answer
async def reward(ctx: Context, trajectory: Trajectory, *, letters: str = LETTERS) -> float:
    """1.0 if `chosen` is the answer, a letter of `letters`; else 0.0. SlimxError: the answer is none of them."""
    answer = answer_of(ctx, __name__).strip().strip("().").upper()
    if len(answer) != 1 or answer not in letters:
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has the answer {ctx.prompt.answer!r}, which is none of the letters {letters}; "
            "correct it or set the option letters",
            code="reward.answer",
            about=ctx.prompt.id,
        )
    return float(chosen(ctx.text, letters) == answer)


def chosen(text: str, letters: str = LETTERS) -> str | None:
    """The letter that a response decides for: its last boxed one; else the last that follows the word answer; else one
    that stands alone on the last line. A letter inside a sentence ("A train leaves") decides nothing."""
    letter = f"([{re.escape(letters)}])"
    for pattern in (
        rf"\\boxed\{{\s*(?:\\(?:text|mathrm)\{{)?\s*\(?{letter}\)?\s*\}}",
        rf"(?i:answer)(?i:\s+is)?\s*:?\s*[*_(\[\s]*{letter}(?![A-Za-z'])",
    ):
        if found := re.findall(pattern, text):
            return found[-1]
    last = text.strip().rpartition("\n")[2].strip().strip("*_")
    alone = re.fullmatch(rf"\(?{letter}\)?[.:)]?(?:\s.*)?", last)
    # "A train leaves" begins with a letter too; behind a mark, or with nothing behind it, it is a choice.
    return alone[1] if alone and re.match(rf"\(?{letter}(?:[).:]|$)", last) else None
