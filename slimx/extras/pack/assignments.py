"""Removal of the values that stand after secret names in texts: `NAME=value`, `name: value`, `"name": "value"`,
`--name value`, in shells, YAML, JSON, Python and headers, also inside quoted strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from slimx.extras.pack.secret_names import Kind, kind_of

REMOVED = "[removed]"
_NAME = r"[A-Za-z_][\w.-]{0,200}"
_CLOSING = r"(''|\"\"|\\*[\"'])?"
_NEXT_LINE = r"(?:\\\n|\\{3,}n)\s{0,60}"
"""End of a line that the shell continues, also in JSON."""
_ASSIGNED = re.compile(
    rf"(?<![\w.-])(-{{0,2}}{_NAME}){_CLOSING}\]?\s{{0,8}}"
    r"(?:=>|:=|:\s?(?:Secret|Optional\[)?[Ss]tr\]?(?: \| None)?\s?=(?!=)|[=:](?!=))"
    rf"(?:\s{{0,60}}(?=\\*[\"'\[{{(])|[ \t]{{0,60}}(?:{_NEXT_LINE})?)"
)
"""Name, closing quote of the name, annotation of Python, separator."""
_FLAG = re.compile(
    rf"(?<![\w.-])(--?{_NAME}){_CLOSING}(?:[ \t]{{0,8}}{_NEXT_LINE}|[ \t]{{1,8}}|,\s{{0,60}}"
    r"|(?:\n|\\+n)\s{0,60}(?:- )?)(?![\s-])|"
    rf"(?<![\w.-])(?:setenv|setx|set -\w{{1,3}}|ENV|ARG)[ \t]{{1,8}}({_NAME})[ \t]{{1,8}}(?=\S)"
)
"""Flag and its closing quote, or name that a shell or Dockerfile sets, before the value."""
_PAIR = re.compile(
    rf"(?<![\w.-])({_NAME}){_CLOSING}(?:"
    r",\s{0,8}(?=[rbu]?\\*[\"'])(?![rbu]?\\*[\"']{1,2}[^\"'\n]{0,200}\\*[\"']{1,2}\s?:)"
    r"|(?:\s{0,40}(?:[|\u2502\u2503]|\\+u250[23]|-?>)\s{0,40}|(?:(?:\t|\\+t)\s{0,40}|[ ]{2,40})(?=[^\s|<>]{0,99}\d))"
    r"(?=[^\s|<>]{0,20}?\w{6})"
    r"|(?:[^\w\\]|\\++n?){1,80}[Vv]alue\\*[\"']{0,2}\s?[=:]\s{0,8})"
)
"""Name and value in a pair, a call, a table, an element of XML, or the values of the keys "name" and "value"."""
_LONGEST = 4000
"""Maximum number of characters of a value in brackets or of a quoted value with line breaks."""
_QUOTES = [
    re.compile(pattern)
    for pattern in (
        rf"[rbuRBU]{{0,2}}(\\*[\"'])\1\1(?P<value>[\s\S]{{0,{_LONGEST}}}?)\1\1\1",
        rf"(\\+[\"'])(?P<value>[^\n]{{0,{_LONGEST}}}?)(?<!\\)\1",  # inside a quoted string
        rf"(''|\"\")(?=[^\s,;)}}\]\"'])(?P<value>[^\n]{{0,{_LONGEST}}}?)\1",  # inside a quoted string of YAML
        r"[rbuRBU]{0,2}[\"'](?P<value>(?:(?<=\")(?:[^\"\\\n]|\\.)*\"|(?<=')(?:[^'\\\n]|\\.)*')"
        r"(?:\\+[\"']|[\"'](?:[^\"'\\\n]|\\.)*[\"']|[^\s,;:&)}\]\"'\\<])*)",  # a shell joins what follows a quoted part
        rf"([\"'])(?P<value>(?:(?!\1)[\s\S]){{0,{_LONGEST}}})\1",
        r"[\"'](?P<value>[^\n]*)",
    )
]
"""Values in quotes; the last form is cut."""
_OPENING = re.compile(r"[A-Za-z_]?[\w.]{0,80}[\[{(]")
"""Begin of a list, a mapping, a tuple or a call."""
_NESTED = re.compile(r"(\\*[\"'])[^\n]{0,400}?(?<!\\)\1|[\[{(]|[\]})]")
_WORD = re.compile(r"\$\{[^}\n]*\}|<[A-Za-z _-]{1,40}>|[^\s,;&\"'})\]]+")
_WORDS = re.compile(r"\$\{[^}\n]*\}|<[A-Za-z _-]{1,40}>|(?:(?!,?[ \t]+[\w.-]+[\"']?\s?[=:]|,\s|[;&\"'})\]\n]).)+")
"""Password with blanks, up to the next assignment."""
_SHORT = re.compile("[a-z]{1,5}")
"""Word after "token:" in a sentence."""
_REST = re.compile(r"[^\n]+")
_START = re.compile(r"[\s>#*|-]*(?:(?:export|set|env|declare -x|typeset -x)[ \t]+)?")
"""Beginning of a line before a name whose value is the rest of the line."""
_BLOCK = re.compile(r"(?:[|>][-+\d]*[ \t]*)?(?=\n)")
_COMMENT = re.compile(r"[ \t]+#")
_HARMLESS = re.compile(
    r"(?:null|none|nil|nan|true|false|yes|no|str|bool|int|\$\{\{?[\w. :]*(?:, ?(?:null)?)?\}?\}|\$[A-Za-z_]\w*"
    r"|<(?:unset|empty|missing|hidden|redacted|masked|your[a-z _-]{0,30}|[a-z _-]{0,20}(?:token|key|password))>"
    r"|\*+|\.\.\.|\{\}|\[\])?",
    re.I,
)
"""Values that are kept: no value, references to variables without a default, types, placeholders."""
_COUNT = re.compile(
    r"[-+]?(?:\d{1,7}|\d*\.\d+|\d+\.\d*)(?:e[-+]?\d+)?%?|<\|\w{1,40}\|?>?|\[[A-Z]{2,6}\]"
    r"|(?-i:</?[a-z_]+\d{0,3}>)"
    r"|[\[(][\d\s,.-]*[\])]",
    re.I,
)
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
    for pattern in (_ASSIGNED, _FLAG, _PAIR):
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
            span = _value(text, kind, match.start(), match.end(), quoted=bool(match[2]) or pattern is _PAIR)
            digit = pattern is not _PAIR or kind == "password" or (span and re.search(r"\d", text[span[0] : span[1]]))
            if span is not None and digit:
                end = span[1]
                yield span


def _value(text: str, kind: Kind, name: int, at: int, *, quoted: bool) -> tuple[int, int] | None:
    """Returns the span of the value that begins at `at`, without its quotes, or None if it is kept. `name`: start of
    the name; `quoted`: True if quotes end the name."""
    for form in _QUOTES:
        value = form.match(text, at)
        if value is not None:
            return _span(text, kind, *value.span("value"))
    begin = text.rfind("\n", max(0, name - 80), name) + 1
    starts = not quoted and (begin > 0 or name <= 80) and _START.fullmatch(text, begin, name) is not None
    opening = _OPENING.match(text, at)
    if opening is not None:
        stop = _closed(text, opening.end() - 1)
        if starts and len(opening[0]) > 1:  # a call, or a password with a bracket
            stop = max(stop, _line_end(text, at))
        return _span(text, kind, at, stop)
    before = text[max(0, name - 1) : name]
    if before and before in "\"'" and not quoted:  # 'Authorization: Digest a="b"'
        closing = re.compile(rf"[^\n{before}]*").match(text, at)
        return closing and _span(text, kind, at, closing.end())
    block = _BLOCK.match(text, at)
    if block is not None and starts and (kind == "password" or block[0] or re.search(r"[Kk]eys\W*$", text[name:at])):
        return _block(text, name - begin, block.end())
    pattern = _WORDS if kind == "password" else _WORD
    value = pattern.match(text, at)
    if value is not None and kind == "token" and not starts and _SHORT.fullmatch(value[0]):
        return None
    if value is not None and starts and _is_secret(kind, _COMMENT.split(value[0])[0]):
        value = _REST.match(text, at)
    return value and _span(text, kind, at, value.end())


def _closed(text: str, at: int) -> int:
    """Returns the end of the brackets that open at `at`, or of the line if they do not close."""
    depth = 0
    for match in _NESTED.finditer(text, at, at + _LONGEST):
        depth += (match[0] in "[{(") - (match[0] in "]})")
        if depth == 0:
            return match.end()
    return _line_end(text, at)


def _line_end(text: str, at: int) -> int:
    return text.find("\n", at) % (len(text) + 1)  # -1 becomes the end of the text


def _span(text: str, kind: Kind, start: int, stop: int) -> tuple[int, int] | None:
    while stop > start and text[stop - 1] in "\"'":
        stop -= 1
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
