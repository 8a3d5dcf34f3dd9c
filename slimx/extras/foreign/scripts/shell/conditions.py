"""Conditions of a script: `[`, `test` and `[[`. Their result is None if it depends on an unknown value."""

from __future__ import annotations

import fnmatch
import operator
import os
import re
from collections.abc import Callable, Mapping

from tree_sitter import Node

from slimx.extras.foreign.scripts.shell.arithmetic import calculated, truth
from slimx.extras.foreign.scripts.shell.expansion import EXTENDED, Variables, unknown_in, without_unset
from slimx.extras.foreign.scripts.shell.syntax import text_in
from slimx.extras.foreign.scripts.shell.words import Words

_NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
_TEXTS: Mapping[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def inverted(status: bool | None) -> bool | None:
    """Returns the status of `! command`."""
    return None if status is None else not status


def tested(words: list[str], variables: Variables) -> bool | None:
    """Returns whether the condition `words` of `[` or `test` holds."""
    match words:
        case ["!", _, *_]:
            return inverted(tested(words[1:], variables))
        case [sign, value]:
            return _single(sign, value)
        case [first, sign, second]:
            numbers = all(re.fullmatch(r"\s*[-+]?\d+\s*", word) for word in (first, second))
            return _pair(first, sign, second, variables) if numbers or sign not in _NUMBERS else None
    return _single("-n", "".join(words)) if len(words) < 2 else None


def holds(node: Node, words: Words) -> bool | None:
    """Returns whether the condition `node` of `[[` holds."""
    parts = node.children
    match node.type:
        case "parenthesized_expression":
            return holds(parts[1], words)
        case "unary_expression" if text_in(parts[0]) == "!":
            return inverted(holds(parts[1], words))
        case "unary_expression":
            return _single(text_in(parts[0]), words.text(parts[1]))
        case "binary_expression":
            return _binary(parts[0], text_in(parts[1]), parts[2], words)
    return _single("-n", words.text(node))


def _binary(first: Node, sign: str, second: Node, words: Words) -> bool | None:
    if sign in ("&&", "||"):
        left = holds(first, words)
        if left is (sign == "||"):
            return left
        right = holds(second, words)
        return right if left is not None or right is (sign == "||") else None
    if first.type == "unary_expression":  # `! a = b`, which the grammar takes for `(! a) = b`
        return inverted(_binary(first.children[1], sign, second, words))
    left_text = without_unset(words.text(first))
    if sign not in ("=", "==", "!=", "=~"):
        return _pair(left_text, sign, words.text(second), words)
    if sign == "=~":
        return None
    status = matches(left_text, without_unset(words.pattern(second)))
    return inverted(status) if sign == "!=" else status


def matches(text: str, pattern: str) -> bool | None:
    """Returns whether all of `text` matches `pattern`; None if that is not known."""
    if unknown_in(text + pattern) or EXTENDED.search(pattern):
        return None
    return fnmatch.fnmatchcase(text, pattern.replace("[^", "[!"))


def _single(sign: str, value: str) -> bool | None:
    value = without_unset(value)
    if unknown_in(value):
        return None
    if sign in ("-n", "-z"):
        return bool(value) == (sign == "-n")
    exists = {"-d": os.path.isdir, "-f": os.path.isfile} | dict.fromkeys(("-e", "-r", "-x", "-s"), os.path.exists)
    if sign not in exists:
        return None
    return exists[sign](os.path.expanduser(value))


def _pair(left: str, sign: str, right: str, variables: Variables) -> bool | None:
    left, right = without_unset(left), without_unset(right)
    if unknown_in(left) or unknown_in(right):
        return None
    if sign in _TEXTS:
        return _TEXTS[sign](left, right)
    if sign not in _NUMBERS:
        return None
    return truth(calculated(f"({left or 0}) {_NUMBERS[sign]} ({right or 0})", variables))
