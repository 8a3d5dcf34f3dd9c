"""The reward of multiple-choice tasks: 1 if the letter that the final answer decides for is the prompt's answer."""

from __future__ import annotations

import re
from functools import cache

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.rewards.shared.boxes import boxes
from slimx.extras.rewards.shared.notation import joined_boxes
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import needs_answer

LETTERS = "ABCDEFGHIJ"
_SPACE = re.compile(r"\\q?quad(?![A-Za-z])|\\[,;: ]|~")
_MARKUP = re.compile(r"\\(?:text|math)?(?:bf|rm|sf|it|tt|normal)?(?![A-Za-z])\s*+(?=\{)|\\[()\[\]]|[*_`${}]")
r"""Marks that only set off what they surround: **B**, $B$, \(B\), \textbf{B}."""
_BE = r"(?:is|are|was|would\s+be|should\s+be|must\s+be|will\s+be)\b"
_STATED = re.compile(
    rf"\b(?:answers?\b\s*+(?:{_BE}\s*+)?+[:=→–-]?+|(?:option|choice)\s*+(?:{_BE}\s*+:?|[:=]))\s*+"
    r"(?:(?:the|my|correct|right|best|most|likely|clearly|probably|therefore|thus|option|choice|letter|answer|is)\b"
    r":?\s*+)*+",
    re.IGNORECASE,
)
"""All up to the letter: "answer is", "Answer:", "the correct choice is option"."""


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
    return float(chosen(ctx.final_answer, letters) == answer)


def chosen(text: str, letters: str = LETTERS) -> str | None:
    """The letter that a response decides for: that of its last box; else the last that follows "answer" or "option is";
    else the one that begins the last line, with a mark or nothing behind it. A letter inside a sentence ("A train
    leaves") decides nothing, and neither do several ("A or B") or a torn box."""
    found = boxes(text)
    if found and (found[-1].end is None or len(joined_boxes(text, found)) > 1):
        return None
    if found:
        inside = re.sub(
            r"(?i)^(?:option|choice|answer)\s*:?\s*", "", _plain(text[found[-1].inside : found[-1].end]).strip()
        )
        inside = inside.upper() if len(inside.strip("().")) == 1 else inside
        if (letter := _letter(inside, 0, letters)) is not None:
            return letter or None
    plain = _plain(text)
    for stated in reversed(list(_STATED.finditer(plain))):
        if (letter := _letter(plain, stated.end(), letters)) is not None:
            return letter or None
    last = plain.strip().rpartition("\n")[2].strip()
    # "A train leaves" begins with a letter too; behind a mark, or with nothing behind it, it is a choice.
    return (_letter(last, 0, letters) or None) if re.match(rf"\(?[{re.escape(letters)}](?:[).:]|$)", last) else None


def _plain(text: str) -> str:
    return _MARKUP.sub("", _SPACE.sub(" ", text))


def _letter(text: str, at: int, letters: str) -> str | None:
    """The letter at `at`; "" where others are joined to it ("A or B"); None if there is none: a word, the article or
    pronoun that begins one, or a term."""
    found = _pattern(letters).match(text, at)
    return None if found is None else "" if found["more"] else (found["enclosed"] or found["bare"]).upper()


@cache
def _pattern(letters: str) -> re.Pattern[str]:
    one, ends = f"[{re.escape(letters)}]", r"(?![\w'’])"
    # In front of a word, "A" and "I" are words too, unless the word gives the reason for the choice.
    word = r"(?!(?<=[AI])\s+(?!(?:because|since|as|is|and|or|due|for)\b)[a-z])"
    bare = rf"(?P<bare>{one}){ends}{word}(?!\s*[+*=^<>]|-\w)"
    enclosed = rf"[(\[]\s*(?P<enclosed>[{re.escape(letters + letters.lower())}])\s*[)\]]"
    maybe = r"(?:(?:or|and|maybe|perhaps|possibly|option|choice)\s+)*+"
    listed = rf"(?:[,;]|[ \t])\s*+[(\[]?{one}{ends}(?!\s+[a-z])"
    joined = rf"(?:[/&]|[,;]?\s*+(?:or|and)\b)\s*+{maybe}[(\[]?{one}{ends}(?!(?<=I)\s+[a-z])"
    return re.compile(rf"[\"'“]?(?:{enclosed}|{bare})[\"'”]?[)\]]?(?P<more>\s?(?:{joined}|{listed}))?")
