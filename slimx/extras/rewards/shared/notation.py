"""Converts notation that math-verify would misread into LaTeX that it understands.

    answer or response --> latex: the same text in LaTeX notation --> expression: is it mathematics, or words?

Each rule exists because the library would read the notation as another value (1.5e3 as 1.5 * e * 3, 0.333... as 0).
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate

from slimx.extras.rewards.shared.boxes import BoxedAnswer

DELIMITED = re.compile(r"\$[^$]+\$|\\\(|\\\[|\\boxed")
"""Pattern of the delimiters that enclose mathematics in a string."""

_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "±": r"\pm ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}", "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", r"\varnothing": r"\emptyset",
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_NAMES = "sqrt|pi|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|infty"
_RULES = [
    (re.compile(r"\\degree(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[a-z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])(pi|infty)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<=[\w)])\*\*(?=[\w({+-])"), "^"),
    (
        re.compile(r"\\(sin|cos|tan|cot|sec|csc)\s*\(?(\d+(?:\.\d+)?)\s*\^\s*+\{?\s*+\\circ\s*\}?\)?"),
        r"\\\1(\\frac{\2\\pi}{180})",
    ),
    # Thousands separators between digits, which would end the number if they were read as a comma or a space.
    (re.compile(r"(?<=\d)(?:,?\\[,!;: ]|\{,\}|\\ )\s*(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d++)(?![\w.]*\w)"), r"\1\\times 10^{\2}"),
]
_AND = r"\\text\s*\{(?>[^{}]*?\b(?:and|or)\b)[^{}]*+\}"
_SPACE = r"\s|\$|\\[()\[\]]|\\q?quad"
_JOINT = re.compile(rf"(?:{_SPACE})*(?:,|;|and|or|{_AND})(?:{_SPACE}|and|or|{_AND}|[A-Za-z](?:_\{{?\w\}}?)?\s*=)*")
_WORDS = re.compile(
    r"(?<![A-Za-z])[A-Za-z]{3,}+(?!\{)|(?:^| )[A-Za-z]{2}(?![A-Za-z]*\{|\s?[=<>]|[+*/^_|!]|-[\dA-Za-z](?![A-Za-z]))"
    r"|[?!.:]\s|\$"
)
"""Pattern found in strings of words rather than mathematics: three letters in a row, two at the start of a word, or the
end of a sentence."""
_REPEATING = re.compile(r"(?<!\d)(\d{0,50})\.(\d{0,50})\\overline\s*\{?(\d{1,50})\}?")


def latex(text: str) -> str:
    """Converts to LaTeX the notation in `text` that math-verify would misread, and leaves everything else unchanged."""
    text = _SIGN.sub(lambda match: _SIGNS[match[0]], text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return _REPEATING.sub(_fraction, text)


def depth(text: str) -> int:
    """Returns the maximum nesting depth of brackets in a string."""
    steps = (1 if character in "([{" else -1 for character in text if character in "()[]{}")
    return max(accumulate(steps), default=0)


def expression(text: str) -> str | None:
    """Returns `text` enclosed in dollar signs if it is an expression, or several expressions separated by commas.
    Returns None if it contains words, or nothing specific to mathematics."""
    text = re.sub(r"\s+", " ", text.strip().replace(r"\$", ""))
    text = re.sub(rf",?\s?(?:{_AND}|(?<=\s)(?:and|or)(?=\s))\s?", ", ", text)
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        text = text.replace(" ", "")
    # A backslash replaces parts with letters that are not words: \text{}, commands, long subscripts, functions.
    bare = re.sub(
        r"\\(?:text|mathrm|mbox|textbf|operatorname)\s*\{[^{}]*\}|_\{\w+\}|\\[A-Za-z]+(?:\{[a-z]+\})?", " \\\\ ", text
    )
    bare = re.sub(rf"(?<![A-Za-z])(?:{_NAMES})(?![A-Za-z])", "\\\\", bare)
    if _WORDS.search(bare):
        return None
    if re.search(r"[\\\d^_=(\[{|+*/<>!-]", bare) or re.fullmatch("[a-z]", bare):
        return f"${text}$"
    return None


def joined_boxes(text: str, in_boxes: list[BoxedAnswer]) -> list[BoxedAnswer]:
    """Returns the last box of a response, preceded by the boxes that are joined to it by "and", "or" or a comma; [] if
    the last box is unclosed. `in_boxes`: all boxes of the response."""
    joined: list[BoxedAnswer] = []
    for box in reversed(in_boxes):
        if box.end is None or (joined and not _JOINT.fullmatch(text[box.stop : joined[-1].start])):
            break
        joined.append(box)
    return joined[::-1]


def last_boxes(text: str, in_boxes: list[BoxedAnswer]) -> str | None:
    """Returns the boxes of `joined_boxes` as one LaTeX expression; None if there are none."""
    joined = [rf"\boxed{{{text[box.inside : box.end]}}}" for box in joined_boxes(text, in_boxes)]
    return f"${', '.join(joined)}$" if joined else None


def _fraction(decimal: re.Match[str]) -> str:
    """Returns a repeating decimal as a LaTeX fraction: 0.1666... is (16 - 1) / 90."""
    integer, fixed, repeated = decimal.groups()
    numerator = int(integer + fixed + repeated) - int(integer + fixed or "0")
    value = Fraction(numerator, (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
