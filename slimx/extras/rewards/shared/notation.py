"""Spellings of mathematics that math-verify misreads, rewritten as the LaTeX that it reads.

    answer or response --> latex: the same text in LaTeX's spelling --> expression: is it mathematics, or words?

Every rule is here because the library takes the spelling for another value (1.5e3 for 1.5 * e * 3, 0.333... for 0).
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate

from slimx.extras.rewards.shared.boxes import Box

DELIMITED = re.compile(r"\$[^$]+\$|\\\(|\\\[|\\boxed")
"""Text that says itself where its mathematics stands."""

_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "±": r"\pm ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}", "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", r"\varnothing": r"\emptyset",
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_NAMES = "sqrt|pi|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|infty"
_RULES = [
    (re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[a-z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])(pi|infty)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<=[\w)])\*\*(?=[\w({+-])"), "^"),
    (
        re.compile(r"\\(sin|cos|tan|cot|sec|csc)\s*\(?(\d+(?:\.\d+)?)\s*\^\s*+\{?\s*+\\circ\s*\}?\)?"),
        r"\\\1(\\frac{\2\\pi}{180})",
    ),
    # Between digits these only set thousands apart; read as a comma or a space they end the number.
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
"""Three letters in a row, two that begin a word, and the end of a sentence."""
_REPEATING = re.compile(r"(?<!\d)(\d{0,50})\.(\d{0,50})\\overline\s*\{?(\d{1,50})\}?")


def latex(text: str) -> str:
    """`text` with those spellings rewritten, and nothing else."""
    text = _SIGN.sub(lambda found: _SIGNS[found[0]], text)
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return _REPEATING.sub(_fraction, text)


def depth(text: str) -> int:
    """The greatest number of brackets that are open at once."""
    steps = (1 if character in "([{" else -1 for character in text if character in "()[]{}")
    return max(accumulate(steps), default=0)


def expression(text: str) -> str | None:
    """`text` between dollar signs if all of it is one expression, or several after commas; None if there are words in
    it, or nothing that only mathematics has."""
    text = re.sub(r"\s+", " ", text.strip().replace(r"\$", ""))
    text = re.sub(rf",?\s?(?:{_AND}|(?<=\s)(?:and|or)(?=\s))\s?", ", ", text)
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        text = text.replace(" ", "")
    # What is no word although it has letters becomes a backslash: text, commands, long subscripts, functions.
    bare = re.sub(
        r"\\(?:text|mathrm|mbox|textbf|operatorname)\s*\{[^{}]*\}|_\{\w+\}|\\[A-Za-z]+(?:\{[a-z]+\})?", " \\\\ ", text
    )
    bare = re.sub(rf"(?<![A-Za-z])(?:{_NAMES})(?![A-Za-z])", "\\\\", bare)
    if _WORDS.search(bare):
        return None
    return f"${text}$" if re.search(r"[\\\d^_=(\[{|+*/<>!-]", bare) or re.fullmatch("[a-z]", bare) else None


def joined_boxes(text: str, found: list[Box]) -> list[Box]:
    """The last of the boxes `found` in a response, with those that "and", "or" or a comma joins to it; none if it is
    torn."""
    joined: list[Box] = []
    for box in reversed(found):
        if box.end is None or (joined and not _JOINT.fullmatch(text[box.stop : joined[-1].start])):
            break
        joined.append(box)
    return joined[::-1]


def last_boxes(text: str, found: list[Box]) -> str | None:
    """The boxes of `joined_boxes` as one expression; None without any."""
    inside = [rf"\boxed{{{text[box.inside : box.end]}}}" for box in joined_boxes(text, found)]
    return f"${', '.join(inside)}$" if inside else None


def _fraction(decimal: re.Match[str]) -> str:
    """The value of a repeating decimal: 0.1666... is (16 - 1) / 90."""
    whole, fixed, repeated = decimal.groups()
    value = Fraction(
        int(whole + fixed + repeated) - int(whole + fixed or "0"), (10 ** len(repeated) - 1) * 10 ** len(fixed)
    )
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
