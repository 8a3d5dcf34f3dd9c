"""Tokens of a shell script: words with their quotes, arrays and operators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slimx.errors import SlimxError

_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_REDIRECTION = re.compile(r"\d*(?:&>>?|>>|>&|>\||>|<<<|<&|<)(?![<(])|\d+(?=[<>])")
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")
_ARRAY = re.compile(r"\w+\+?=\($")
_ENDS = frozenset(" \t\n;|&()<>")
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class Token:
    """A word or an operator of a script."""

    text: str
    """Text as in the script, with quotes; for an array the name and the sign, such as `ARGS+=`."""
    operator: bool = False
    array: tuple[str, ...] | None = None
    """Words of an array, with their quotes; None for any other token."""


def tokens_of(text: str) -> list[Token]:
    """Returns the tokens of the script `text`, without comments, redirections and here-documents. Raises SlimxError if
    a quote or a bracket is not closed."""
    return list(_tokens(text.replace("\\\r\n", " ").replace("\\\n", " ").replace("\r\n", "\n")))


def _tokens(text: str) -> Iterator[Token]:
    index = 0
    documents: list[tuple[str, bool]] = []  # here-documents that begin after this line
    while index < len(text):
        if text[index] in " \t":
            index += 1
            continue
        if text[index] == "#":
            index = _end_of_line(text, index)
            continue
        heredoc = _HEREDOC.match(text, index)
        if heredoc is not None:
            documents.append((heredoc[3], heredoc[1] == "-"))
            index = heredoc.end()
            continue
        redirection = _REDIRECTION.match(text, index) or re.compile(r"&>>?").match(text, index)
        if redirection is not None and not redirection[0].isdigit():
            index = _past_target(text, redirection.end())
            continue
        if redirection is not None:
            index = redirection.end()
            continue
        operator = next((sign for sign in _OPERATORS if text.startswith(sign, index)), None)
        if operator is not None:
            yield Token(operator, operator=True)
            index += len(operator)
            if operator == "\n" and documents:
                for name, indented in documents:
                    index = _past_document(text, index, name, indented)
                documents = []
            continue
        end = word_end(text, index)
        word = text[index:end]
        if _ARRAY.match(word + text[end : end + 1]):
            close = closing(text, end)
            inner = tokens_of(text[end + 1 : close])
            yield Token(word, array=tuple(token.text for token in inner if not token.operator))
            index = close + 1
            continue
        yield Token(word)
        index = max(end, index + 1)


def word_end(text: str, index: int) -> int:
    """Returns the index after the word that starts at `index`."""
    while index < len(text) and text[index] not in _ENDS:
        index = part_end(text, index)
    return index


def part_end(text: str, index: int) -> int:
    """Returns the index after the character, quotation or expansion that starts at `index`."""
    if text[index] == "\\":
        return min(index + 2, len(text))
    if text[index] == "'":
        return _find(text, "'", index + 1, index) + 1
    if text[index] == '"':
        return _quoted_end(text, index)
    if text[index] == "`":
        return _find(text, "`", index + 1, index) + 1
    if text[index] == "$" and text[index + 1 : index + 2] in _CLOSING:
        return closing(text, index + 1) + 1
    return index + 1


def closing(text: str, index: int) -> int:
    """Returns the index of the bracket that closes the one at `index`. Raises SlimxError if there is none."""
    start = index
    close = _CLOSING[text[index]]
    depth = 0
    while index < len(text):
        sign = text[index]
        if sign == text[start]:
            depth += 1
        elif sign == close:
            depth -= 1
            if depth == 0:
                return index
        elif sign == "#" and text[index - 1 : index] in (" ", "\t", "\n") and close == ")":
            index = _end_of_line(text, index)
            continue
        if sign in "\\'\"`" or (sign == "$" and text[index + 1 : index + 2] in _CLOSING):
            index = part_end(text, index)
        else:
            index += 1
    raise _open(text, start)


def _quoted_end(text: str, start: int) -> int:
    index = start + 1
    while index < len(text):
        if text[index] == '"':
            return index + 1
        index = index + 1 if text[index] == "'" else part_end(text, index)
    raise _open(text, start)


def _find(text: str, sign: str, index: int, start: int) -> int:
    found = text.find(sign, index)
    if found < 0:
        raise _open(text, start)
    return found


def _open(text: str, index: int) -> SlimxError:
    line = text.count("\n", 0, index) + 1
    return SlimxError(
        f"{text[index]} in line {line} of the script is never closed; close it, or give a file with only the flags",
        code="foreign.open_quote",
        about=text[index],
    )


def _end_of_line(text: str, index: int) -> int:
    end = text.find("\n", index)
    return len(text) if end < 0 else end


def _past_target(text: str, index: int) -> int:
    """Returns the index after the target of a redirection whose sign ends at `index`."""
    while text[index : index + 1] in (" ", "\t"):
        index += 1
    return word_end(text, index)


def _past_document(text: str, index: int, name: str, indented: bool) -> int:
    """Returns the index after the here-document that starts at `index` and ends with the line `name`."""
    while index < len(text):
        end = _end_of_line(text, index)
        line = text[index:end]
        index = end + 1
        if (line.lstrip("\t") if indented else line) == name:
            break
    return min(index, len(text))
