"""Text that others wrote, made fit for a terminal: models, agents, servers and files decide what it holds.

Control characters (C0, C1, delete), which begin escape sequences, and marks that turn the order of letters round are
shown as JSON writes them (`\\u001b`), so that output with --json stays JSON. What prints sampled or remote text asks
`visible`; what prints through rich also keeps its markup from being read (`plain`).
"""

from __future__ import annotations

import re

from rich.text import Text

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed, delete, C1
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, separators, what nobody sees
    "\ud800-\udfff]"  # lone surrogates, which no terminal can be sent
)


def visible(text: object) -> str:
    """`text` with every character that could command a terminal shown by its code; lines and tabs stay."""
    return _UNSAFE.sub(_code, str(text))


def one_line(text: object) -> str:
    """`visible` text on one line: line feeds and tabs are shown too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def with_log(text: object) -> str:
    """`one_line`, and below it the lines of a log that a message quotes, which begin with two spaces."""
    return one_line(text).replace("\\n  ", "\n  ")


def plain(text: object) -> Text:
    """`one_line` for rich: brackets are no markup and figures are not coloured."""
    return Text(one_line(text))


def _code(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
