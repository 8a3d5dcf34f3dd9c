r"""Finds answers that are marked in text: \boxed{...}, \fbox{...} in older text, and <answer>...</answer>."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARK = re.compile(
    r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z])[^\S\n]*)(?P<opens>\s*\{)?"
    r"|(?<!\\)(?P<slashes>\\*)(?P<brace>[{}])|(?P<end>[$\n]|\\[\])])"
)
r"""Pattern of the marks at which boxes start or end. A brace after an odd number of backslashes, \{, is a literal
brace."""
_WORD = re.compile(r"[^\s.,;:!?]*(?:[.,]\d[^\s.,;:!?]*)*")


@dataclass(frozen=True, slots=True)
class BoxedAnswer:
    r"""Boxed answer in a string: \boxed{...} or \fbox{...}. Its content is `text[inside:end]` of the string `text`."""

    start: int
    inside: int
    end: int | None
    """Index of the first character after the box's content; None if the box is unclosed."""
    stop: int
    """Index of the first character after the closing brace; for an unclosed box, the end of the string."""


def boxes(text: str) -> list[BoxedAnswer]:
    r"""Returns the boxes in a string, in the order in which they start. A box without braces, such as `$\boxed 2$`,
    ends where its formula ends, or after its first word if the formula has no end."""
    found: list[BoxedAnswer | None] = []
    braces: list[tuple[int, int, int] | None] = []
    """For each open brace: index of its box in `found`, start of the box and start of its content; None if the brace
    opens no box."""
    bare: tuple[int, int] | None = None
    """Start of a box without braces whose end has not been found yet, and start of its content; None if there is
    none."""
    for mark in _MARK.finditer(text):
        if bare is not None and not mark["brace"]:
            found.append(_bare(text, *bare, mark.start(), closed=bool(mark["end"]) and mark["end"] != "\n"))
            bare = None
        if mark["opens"]:
            braces.append((len(found), mark.start(), mark.end()))
            found.append(BoxedAnswer(mark.start(), mark.end(), None, len(text)))
        elif mark["box"]:
            bare = mark.span("box")
        elif mark["brace"] and len(mark["slashes"]) % 2 == 0:
            if mark["brace"] == "{":
                braces.append(None)
            elif braces:
                box = braces.pop()
                if box is not None:
                    index, start, inside = box
                    found[index] = BoxedAnswer(start, inside, mark.end() - 1, mark.end())
    if bare is not None:
        found.append(_bare(text, *bare, len(text), closed=False))
    return [box for box in found if box is not None]


def last_box(text: str) -> str | None:
    """Returns the content of the last box in a string; None if there is no box or the last one is unclosed."""
    found = boxes(text)
    if not found or found[-1].end is None:
        return None
    return text[found[-1].inside : found[-1].end]


def tagged(text: str) -> str:
    """Returns the text between the last <answer> and its </answer>; the whole text if there is no <answer>, and "" if
    the last one is unclosed."""
    _, tag, rest = text.rpartition("<answer>")
    if not tag:
        return text
    content, end, _ = rest.partition("</answer>")
    return content if end else ""


def stated(text: str) -> str:
    r"""Returns the content of the last box of `tagged(text)`; all of it if there is no box, and "" if the last one is
    unclosed."""
    text = tagged(text)
    found = boxes(text)
    if not found:
        return text
    return "" if found[-1].end is None else text[found[-1].inside : found[-1].end]


def _bare(text: str, start: int, inside: int, stop: int, *, closed: bool) -> BoxedAnswer | None:
    r"""Returns the brace-less box that starts at `start` and has its content from `inside` on; None if the string only
    mentions \boxed. `stop`: index of the formula's end if `closed`; otherwise of the end of the text that may belong to
    the box."""
    if closed:
        return BoxedAnswer(start, inside, stop, stop) if text[inside:stop].strip() else None
    end = _WORD.match(text, inside, stop).end()  # type: ignore[union-attr]  # it matches the empty text too
    if end == len(text) == inside:
        return BoxedAnswer(start, inside, None, end)
    if re.search(r"[\d\\]|^.$", text[inside:end]):
        return BoxedAnswer(start, inside, end, end)
    return None
