r"""Finds the \boxed{...} in which mathematical texts put their answers, and the \fbox{...} of older ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARK = re.compile(
    r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z])[^\S\n]*)(?P<opens>\s*\{)?"
    r"|(?<!\\)(?P<slashes>\\*)(?P<brace>[{}])|(?P<end>[$\n]|\\[\])])"
)
r"""All that decides where boxes begin and end. A brace behind an odd number of backslashes, \{, is a sign."""
_WORD = re.compile(r"[^\s.,;:!?]*(?:[.,]\d[^\s.,;:!?]*)*")


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a text; its content is `text[inside:end]`."""

    start: int
    inside: int
    end: int | None
    """None for a box that is torn, whose braces never close."""
    stop: int
    """End of its closing brace, of a torn box that of the text."""


def boxes(text: str) -> list[Box]:
    r"""Returns the boxes of a text, in the order in which they begin. A box without braces, `$\boxed 2$`, reaches to
    the end of its mathematics, or of its first word where that has no end."""
    found: list[Box | None] = []
    braces: list[tuple[int, int, int] | None] = []
    """Number, start and first character inside of the box of each open brace; None without one."""
    bare: tuple[int, int] | None = None
    """Start and first character inside of a box without braces, until its end is known."""
    for mark in _MARK.finditer(text):
        if bare is not None and not mark["brace"]:
            found.append(_bare(text, *bare, mark.start(), closed=bool(mark["end"]) and mark["end"] != "\n"))
            bare = None
        if mark["opens"]:
            braces.append((len(found), mark.start(), mark.end()))
            found.append(Box(mark.start(), mark.end(), None, len(text)))
        elif mark["box"]:
            bare = mark.span("box")
        elif mark["brace"] and len(mark["slashes"]) % 2 == 0:
            if mark["brace"] == "{":
                braces.append(None)
            elif braces and (box := braces.pop()) is not None:
                number, start, inside = box
                found[number] = Box(start, inside, mark.end() - 1, mark.end())
    if bare is not None:
        found.append(_bare(text, *bare, len(text), closed=False))
    return [box for box in found if box is not None]


def last_box(text: str) -> str | None:
    """Returns the content of the last box of a text; None where there is none, and where the last one is torn."""
    found = boxes(text)
    return text[found[-1].inside : found[-1].end] if found and found[-1].end is not None else None


def _bare(text: str, start: int, inside: int, stop: int, *, closed: bool) -> Box | None:
    """Returns the box without braces whose mathematics, if `closed`, ends at `stop`; None for a mere mention."""
    if not closed:
        end = _WORD.match(text, inside, stop).end()  # type: ignore[union-attr]  # it matches the empty text too
        if end == len(text) == inside:
            return Box(start, inside, None, end)
        return Box(start, inside, end, end) if re.search(r"[\d\\]|^.$", text[inside:end]) else None
    return Box(start, inside, stop, stop) if text[inside:stop].strip() else None
