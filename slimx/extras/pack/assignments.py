"""Removal of the values that stand after secret names in texts: `NAME=value`, `name: value`, `"name": "value"`,
`--name value`, in shells, YAML, JSON, Python and headers, also inside quoted strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from slimx.extras.pack.secret_names import Kind, kind_of

REMOVED = "[removed]"
_NAME = r"[A-Za-z_][\w.-]{0,200}"
_CLOSING = r"(''|\"\"|\\*[\"'])?"
_ASSIGNED = re.compile(
    rf"(?<![\w.-])(-{{0,2}}{_NAME}){_CLOSING}\]?\s{{0,8}}(?:=>|:=|[=:])(?:\s{{0,60}}(?=\\*[\"'\[{{(])|[ \t]{{0,60}})"
)
"""Name, closing quote of the name, separator."""
_FLAG = re.compile(
    rf"(?<![\w.-])(--?{_NAME}){_CLOSING}(?:[ \t]{{1,8}}|,\s{{0,60}}|(?:\n|\\+n)\s{{0,60}}- )(?![\s-])|"
    rf"(?<![\w.-])(?:setenv|ENV|ARG)[ \t]{{1,8}}({_NAME})[ \t]{{1,8}}(?=\S)"
)
"""Flag and its closing quote, or name that a shell or Dockerfile sets, before the value."""
_LONGEST = 4000
"""Maximum number of characters of a value in brackets or of a quoted value with line breaks."""
_ESCAPED = re.compile(rf"(\\+)([\"'])(?!\1\2)[^\n]{{0,{_LONGEST}}}?(?<!\\)\1\2|(\\+)([\"'])\3\4")
"""Quoted value inside a quoted string."""
_DOUBLED = re.compile(rf"(''|\"\")(?=[^\s,;)}}\]\"'])[^\n]{{0,{_LONGEST}}}?\1")
"""Quoted value inside a quoted string of YAML."""
_QUOTED = re.compile(
    r"[rbuRBU]{0,2}(?:\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')"
    r"(?:\\+[\"']|[\"'](?:[^\"'\\\n]|\\.)*[\"']|[^\s,;:&)}\]\"'\\])*"  # a shell joins what follows a quoted part
)
_LINES = re.compile(rf"\"[^\"]{{0,{_LONGEST}}}\"|'[^']{{0,{_LONGEST}}}'")
_BRACKETS = re.compile(rf"[\[{{(][^\[\]{{}}()]{{0,{_LONGEST}}}[\]}})]")
_WORD = re.compile(r"\$\{[^}\n]*\}|[^\s,;&\"'})\]]+")
_WORDS = re.compile(r"\$\{[^}\n]*\}|(?:(?!,?[ \t]+[\w.-]+[\"']?\s?[=:]|,\s|[;&\"'})\]\n]).)+")
"""Password with blanks, up to the next assignment."""
_SHORT = re.compile("[a-z]{1,5}")
"""Word after "token:" in a sentence."""
_REST = re.compile(r"[^\n]+")
_START = re.compile(r"[\s>#*|-]*(?:(?:export|set|env|declare -x|typeset -x)[ \t]+)?")
"""Beginning of a line before a name whose value is the rest of the line."""
_BLOCK = re.compile(r"(?:[|>][-+\d]*[ \t]*)?(?=\n)")
_COMMENT = re.compile(r"[ \t]+#")
_HARMLESS = re.compile(
    r"(?:null|none|nil|nan|true|false|yes|no|str|bool|int|\$\{.*\}|\$[A-Za-z_]\w*|<.*>|\*+|\.\.\.)?", re.I | re.S
)
"""Values that are kept: no value, references to variables, types, placeholders."""
_COUNT = re.compile(r"[-+]?(?:\d{1,7}|\d*\.\d+|\d+\.\d*)(?:e[-+]?\d+)?%?|<.*|\[[A-Z]{2,6}\]|[\[(][\d\s,.-]*[\])]", re.I)
"""Values of names of tokens that are kept: numbers, special tokens, lists of token ids."""


def is_secret(name: str, value: str) -> bool:
    """Returns True if `value`, the value of the key or variable `name`, is a secret."""
    return _is_secret(kind_of(name), value)


def _is_secret(kind: Kind, value: str) -> bool:
    value = value.strip()
    if not kind or _HARMLESS.fullmatch(value) or REMOVED in value[: len(REMOVED) + 4]:
        return False
    return kind == "password" or _COUNT.fullmatch(value) is None


def without_values(text: str, found: Callable[[str], object]) -> str:
    """Returns `text` without the values after secret names, and calls `found` with each of them."""
    for pattern in (_ASSIGNED, _FLAG):
        parts = []
        end = 0
        for start, stop in _values(text, pattern):
            found(text[start:stop])
            parts += [text[end:start], REMOVED]
            end = stop
        text = "".join([*parts, text[end:]])
    return text


def _values(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each secret value in `text`."""
    end = 0
    for match in pattern.finditer(text):
        kind: Kind = ""
        if match.start() >= end:
            kind = kind_of(next(filter(None, match.groups())))
        if kind:
            span = _value(text, kind, match.start(), match.end(), quoted=bool(match[2]))
            if span is not None:
                end = span[1]
                yield span


def _value(text: str, kind: Kind, name: int, at: int, *, quoted: bool) -> tuple[int, int] | None:
    """Returns the span of the value that begins at `at`, without its quotes, or None if it is kept. `name`: start of
    the name; `quoted`: True if quotes end the name."""
    escaped = _ESCAPED.match(text, at)
    if escaped is not None:
        width = len(escaped[1] or escaped[3]) + 1
        return _span(text, kind, at + width, escaped.end() - width)
    doubled = _DOUBLED.match(text, at)
    if doubled is not None:
        return _span(text, kind, at + 2, doubled.end() - 2)
    first = text[at : at + 1]
    value = _QUOTED.match(text, at)
    if value is not None:
        stop = value.end()
        if text[stop - 1] in "\"'":
            stop -= 1
        return _span(text, kind, value.start() + value[0].index(_quote_of(value[0])) + 1, stop)
    if first in ('"', "'"):
        stop = text.find("\n", at) % (len(text) + 1)  # -1 becomes the end of the text
        value = _LINES.match(text, at)
        if value is not None:
            stop = value.end() - 1
        return _span(text, kind, at + 1, stop)
    if first in ("[", "{", "("):
        value = _BRACKETS.match(text, at)
        if value is not None:
            return _span(text, kind, at, value.end())
    before = text[max(0, name - 1) : name]
    if before and before in "\"'" and not quoted:  # 'Authorization: Digest a="b"'
        closing = re.compile(rf"[^\n{before}]*").match(text, at)
        return closing and _span(text, kind, at, closing.end())
    begin = text.rfind("\n", max(0, name - 80), name) + 1
    starts = not quoted and (begin > 0 or name <= 80) and _START.fullmatch(text, begin, name) is not None
    block = _BLOCK.match(text, at)
    if block is not None and starts and (kind == "password" or block[0]):
        return _block(text, name - begin, block.end())
    pattern = _WORDS if kind == "password" else _WORD
    value = pattern.match(text, at)
    if value is not None and kind == "token" and not starts and _SHORT.fullmatch(value[0]):
        return None
    if value is not None and starts and _is_secret(kind, _COMMENT.split(value[0])[0]):
        value = _REST.match(text, at)
    return value and _span(text, kind, at, value.end())


def _quote_of(value: str) -> str:
    return next(letter for letter in value if letter in "\"'")


def _span(text: str, kind: Kind, start: int, stop: int) -> tuple[int, int] | None:
    if not _is_secret(kind, text[start:stop]):
        return None
    return start, stop


def _block(text: str, indentation: int, start: int) -> tuple[int, int] | None:
    """Returns the span of the lines after `start` that are indented more than `indentation`, or are entries of a
    list."""
    lines = re.compile(rf"(?:\n(?:[ \t]{{{indentation + 1},}}[^\n]+|[ \t]{{{indentation}}}- [^\n]+|[ \t]*(?=\n)))+")
    block = lines.match(text, start)
    if block is None or not block[0].strip():
        return None
    return block.start() + 1, block.end()
