"""Untrusted text for a terminal: output of models, agents, servers and files.

Control characters (C0, C1, delete), which begin escape sequences, and marks that change the direction of text are shown
as in JSON (`\\u001b`), which keeps output of --json valid. Code that prints sampled or remote text uses `visible`;
code that prints with rich uses `plain`, which also disables markup.
"""

from __future__ import annotations

import re

from rich.text import Text

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and line feed, delete, C1
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, separators, invisible
    "\ud800-\udfff]"  # lone surrogates, which cannot be encoded
)


def visible(text: object) -> str:
    """Returns `text` with every control character shown by its code, except line feeds and tabs."""
    return _UNSAFE.sub(_code, str(text))


def one_line(text: object) -> str:
    """Returns `visible` text on one line, with line feeds and tabs shown too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def with_log(text: object) -> str:
    """Returns `one_line` text, followed by the lines of a log quoted in it, which begin with two spaces."""
    return one_line(text).replace("\\n  ", "\n  ")


def plain(text: object) -> Text:
    """Returns `one_line` text for rich, without markup or coloured numbers."""
    return Text(one_line(text))


def _code(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
