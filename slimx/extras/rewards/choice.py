"""Reward for multiple-choice tasks: 1 if the final answer chooses the letter of the prompt's answer, else 0."""

from __future__ import annotations

import re
from functools import cache

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.rewards.shared.boxes import boxes, tagged
from slimx.extras.rewards.shared.notation import joined_boxes
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import needs_answer

LETTERS = "ABCDEFGHIJ"
_SPACE = re.compile(r"\\q?quad(?![A-Za-z])|\\[,;: ]|~")
_MARKUP = re.compile(r"\\(?:text|math)?(?:bf|rm|sf|it|tt|normal)?(?![A-Za-z])\s*+(?=\{)|\\[()\[\]]|[*_`${}]")
r"""Pattern of markup around a letter: **B**, $B$, \(B\), \textbf{B}."""
_BE = r"(?:is|are|was|would\s+be|should\s+be|must\s+be|will\s+be)\b"
_STATED = re.compile(
    rf"\b(?:answers?\b\s*+(?:{_BE}\s*+)?+[:=→–-]?+|(?:option|choice)\s*+(?:{_BE}\s*+:?|[:=]))\s*+"
    r"(?:(?:the|my|correct|right|best|most|likely|clearly|probably|therefore|thus|option|choice|letter|answer|is)\b"
    r":?\s*+)*+",
    re.IGNORECASE,
)
"""Pattern of the text in front of the chosen letter, such as "answer is", "Answer:" or "the correct choice is
option"."""


@needs_answer
async def reward(ctx: Context, trajectory: Trajectory, *, letters: str = LETTERS) -> float:
    """Returns 1.0 if the response chooses the prompt's answer, else 0.0. `letters`: letters of the choices. Raises
    SlimxError if the prompt's answer is not one of them."""
    answer = answer_of(ctx, __name__).strip().strip("().").upper()
    if len(answer) != 1 or answer not in letters:
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has the answer {ctx.prompt.answer!r}, which is not one of the letters "
            f"{letters}; set the answer to one of these letters, or list the letters of the choices in "
            "reward.options.letters",
            code="reward.answer",
            about=ctx.prompt.id,
        )
    return float(chosen(ctx.final_answer, letters) == answer)


def chosen(text: str, letters: str = LETTERS) -> str | None:
    """Returns the letter that a response chooses; None if the choice is not clear.

    If there is an <answer>, only the text between the last one and its </answer> counts. The letter is searched for in
    the last box, then after the last "answer" or "option is", then at the start of the last line, where only
    punctuation or nothing may follow it. A letter that is a word ("A train leaves") does not count. Several letters ("A
    or B") or an unclosed box are not a clear choice."""
    text = tagged(text)
    in_boxes = boxes(text)
    if in_boxes and (in_boxes[-1].end is None or len(joined_boxes(text, in_boxes)) > 1):
        return None
    if in_boxes:
        content = _plain(text[in_boxes[-1].inside : in_boxes[-1].end]).strip()
        content = re.sub(r"(?i)^(?:option|choice|answer)\s*:?\s*", "", content)
        if len(content.strip("().")) == 1:
            content = content.upper()
        letter = _letter(content, 0, letters)
        if letter is not None:
            return letter or None
    plain = _plain(text)
    for stated in reversed(list(_STATED.finditer(plain))):
        letter = _letter(plain, stated.end(), letters)
        if letter is not None:
            return letter or None
    last_line = plain.strip().rpartition("\n")[2].strip()
    # "A train leaves" starts with a letter, too; it is a choice only if punctuation or nothing follows it.
    if re.match(rf"\(?[{re.escape(letters)}](?:[).:]|$)", last_line):
        return _letter(last_line, 0, letters) or None
    return None


def _plain(text: str) -> str:
    return _MARKUP.sub("", _SPACE.sub(" ", text))


def _letter(text: str, start: int, letters: str) -> str | None:
    """Returns the letter at index `start` of the text. Returns "" if other letters are joined to it ("A or B"), and
    None if it is not a choice, but a word (the article "A", the pronoun "I") or part of a formula."""
    match = _pattern(letters).match(text, start)
    if match is None:
        return None
    if match["more"]:
        return ""
    return (match["enclosed"] or match["bare"]).upper()


@cache
def _pattern(letters: str) -> re.Pattern[str]:
    one = f"[{re.escape(letters)}]"
    ends = r"(?![\w'’])"
    # "A" and "I" before a word are words themselves, unless the word introduces the reason for the choice.
    word = r"(?!(?<=[AI])\s+(?!(?:because|since|as|is|and|or|due|for)\b)[a-z])"
    bare = rf"(?P<bare>{one}){ends}{word}(?!\s*[+*=^<>]|-\w)"
    enclosed = rf"[(\[]\s*(?P<enclosed>[{re.escape(letters + letters.lower())}])\s*[)\]]"
    maybe = r"(?:(?:or|and|maybe|perhaps|possibly|option|choice)\s+)*+"
    listed = rf"(?:[,;]|[ \t])\s*+[(\[]?{one}{ends}(?!\s+[a-z])"
    joined = rf"(?:[/&]|[,;]?\s*+(?:or|and)\b)\s*+{maybe}[(\[]?{one}{ends}(?!(?<=I)\s+[a-z])"
    return re.compile(rf"[\"'“]?(?:{enclosed}|{bare})[\"'”]?[)\]]?(?P<more>\s?(?:{joined}|{listed}))?")
