r"""Makes untrusted text safe for a terminal: output of models, agents, servers and files.

Control characters (C0, C1, delete), which start escape sequences, and marks that change the direction of text are
replaced with their codes as in JSON (`\u001b`), so output of --json stays valid. Code that prints sampled or remote
text uses `visible`. Code that prints with the library rich uses `plain`, which also disables markup."""

from __future__ import annotations

import re

from rich.text import Text

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and line feed; delete; C1
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, separators, invisible
    "\ud800-\udfff]"  # lone surrogates, which cannot be encoded in UTF-8
)


def visible(text: object) -> str:
    """Returns `text` with control characters and direction marks replaced with their codes; line feeds and tabs are
    kept."""
    return _UNSAFE.sub(_code, str(text))


def one_line(text: object) -> str:
    r"""Returns `text` on one line: the result of `visible`, with line feeds and tabs replaced with `\n` and `\t`."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def with_log(text: object) -> str:
    """Returns `text` on one line, as `one_line` does, but keeps lines that start with two spaces (lines quoted from a
    log) as separate lines."""
    return one_line(text).replace("\\n  ", "\n  ")


def plain(text: object) -> Text:
    """Returns the result of `one_line` as an object that rich prints without interpreting markup or coloring
    numbers."""
    return Text(one_line(text))


def _code(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
