"""Reward for counting: 1 if the number in the final answer equals the prompt's answer, else 0 or partial credit."""

from __future__ import annotations

import re

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.rewards.shared.boxes import stated
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import needs_answer

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_WORDS = {word: number for number, word in enumerate(_SMALL.split())}
_WORD = "|".join([*_WORDS, "thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million"])
_PHRASE = re.compile(rf"(?<![\w-])(?P<number>(?:{_WORD})\b(?:[ -](?:and )?(?:{_WORD})\b)*+(?:-\w++)?)", re.IGNORECASE)
"""Pattern of a number in words. It includes numbers that are not in `_WORDS`, so that twenty-one is not read as one."""
_DIGITS = re.compile(r"(?P<sign>(?<![^\W_])[-−])?(?<![^\W_])(?P<number>[0-9]++(?:[.,][0-9]++)*+)(?P<word>[^\W_]*+)")
"""Pattern of a number in ASCII digits. It is not a number, but part of a word such as 3D or 2nd, if `word` is not
empty."""
_INTEGER = re.compile(r"(?P<value>[0-9]{1,15}|[0-9]{1,3}(?:,[0-9]{3}){1,4})(?:\.0*)?")


@needs_answer
async def reward(ctx: Context, trajectory: Trajectory, *, partial: bool = False) -> float:
    """Returns 1.0 if the last number in the final answer (in its box, or between <answer> and </answer>, if it has one)
    equals the prompt's answer, an integer. Returns 0.0 otherwise or, with `partial`, the value 1 - |number - answer| /
    answer, but at least 0. Raises SlimxError if the prompt's answer is not an integer of at least 0."""
    answer = _integer(answer_of(ctx, __name__).strip())
    if answer is None:
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has the answer {ctx.prompt.answer!r}, which is not a number of objects; set the "
            "answer to an integer of at least 0",
            code="reward.answer",
            about=ctx.prompt.id,
        )
    number = last_integer(stated(ctx.final_answer))
    if number is None:
        return 0.0
    if not partial or not answer:
        return float(number == answer)
    return max(0.0, 1 - abs(number - answer) / answer)


def last_integer(text: str) -> int | None:
    """Returns the last number in digits or, if there is none, the last in words from zero to twenty. Returns None if
    there is no number, or that number is not an integer of up to 15 digits."""
    text = text.replace("{,}", ",")
    numbers = [match for match in _DIGITS.finditer(text) if not match["word"]]
    if numbers:
        value = _integer(numbers[-1]["number"])
        return -value if value and numbers[-1]["sign"] else value
    phrases = list(_PHRASE.finditer(text))
    return _integer(phrases[-1]["number"]) if phrases else None


def _integer(number: str) -> int | None:
    """Returns the value of a number in digits or words; None if it is not an integer of up to 15 digits, or words for
    more than twenty."""
    match = _INTEGER.fullmatch(number)
    return int(match["value"].replace(",", "")) if match else _WORDS.get(number.lower())
