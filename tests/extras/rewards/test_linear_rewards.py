"""Parsers of rewards take time in proportion to a text, whatever a model writes into it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from slimx.data.chat.responses import final_answer
from slimx.extras.boxes.programs.answers import last_program, marked_answer
from slimx.extras.rewards.choice import chosen
from slimx.extras.rewards.f1 import words
from slimx.extras.rewards.images.coordinates import boxes_in, points_in
from slimx.extras.rewards.images.count import last_integer
from slimx.extras.rewards.math import _stated
from slimx.extras.rewards.shared.boxes import boxes, last_box, stated
from slimx.extras.rewards.shared.notation import depth, expression, last_boxes, latex
from slimx.extras.slime import grading
from tests.unit.proportion import grows

PARSERS: dict[str, Callable[[str], object]] = {
    "boxes": lambda text: last_boxes(text, boxes(text)),
    "latex": latex,
    "expression": expression,
    "stated": lambda text: _stated(latex(text)),
    "depth": depth,
    "choice": chosen,
    "coordinates": lambda text: (boxes_in(text), points_in(text)),
    "count": last_integer,
    "result": stated,
    "words": words,
    "program": last_program,
    "marked": marked_answer,
    "final": final_answer,
    "box": last_box,
    "dapo": lambda text: grading.RULES["dapo"](text[:-300], "no"),
}
SHAPES: dict[str, tuple[str, str, str]] = {
    "boxes that never close": ("", r"\boxed{", ""),
    "boxes inside one another": ("", r"\boxed{", "}"),
    "joined boxes": ("", r"\boxed{1}, ", ""),
    "boxes without braces": ("", r"\boxed ", "$"),
    "frames": ("", r"\fbox 1 ", ""),
    "braces": ("", "{", "}"),
    "torn braces": (r"\boxed", "{", ""),
    "brackets": ("", "(", ")"),
    "backslashes": ("5 ", "\\", " 6"),
    "backslashes in a box": (r"\boxed{", "\\", "}"),
    "line breaks": ("5", "\n", "6"),
    "spaces": ("5", " ", "6"),
    "spaces behind a box": (r"\boxed{1}", " ", r"\boxed{2}"),
    "spaces behind a box without braces": (r"\boxed", " ", "!"),
    "digits": ("", "1", "x"),
    "digits of an exponent": ("1e", "1", "x"),
    "points": ("", "1.", "x"),
    "dollars": ("", "$", ""),
    "torn dollars": ("", "$ a ", ""),
    "words": ("", "a", "{"),
    "answers": ("", "answer ", ""),
    "answers that are": ("answer", " is ", "x"),
    "spaces behind an answer": ("answer", " ", "x"),
    "letters": ("Answer: ", "A or ", "x"),
    "options": ("", "option ", "x"),
    "torn text": (r"5 \text{", "and ", ""),
    "texts": ("5 ", r"\text{and ", ""),
    "text between boxes": (r"\boxed{1}\text{", "and ", r"\boxed{2}"),
    "degrees": (r"\sin 1^", " ", "x"),
    "roots": ("", "√(", ""),
    "functions": ("", "sqrt(", ""),
    "periods": ("", r"0.\overline", "{1}"),
    "thousands": ("1", r"\,  ", "x"),
    "fences": ("", "```\n", ""),
    "marked fences": ("", "```python\n", ""),
    "backticks": ("", "`", ""),
    "fences in a line": ("", "``` ", ""),
    "answers marked": ("", "<answer>", ""),
    "thinking": ("", "<think>", ""),
    "thoughts": ("", "</think>", ""),
    "channels": ("", "<|channel|>final", ""),
    "subscripts": ("", "_{a", ""),
    "quotes": ("Answer: ", '"', "A"),
    "stars": ("", "*", ""),
    "fractions inside one another": ("", r"\frac{1}{", "}"),
    "exponents inside one another": ("2", "^{", ""),
    "torn brackets": (r"\boxed{", r"\left(", "}"),
    "equations": ("", "x_1 = ", ""),
    "signs of equality": ("1", "=", "2"),
    "braces behind backslashes": ("", r"\{", ""),
    "combining marks": ("a", "\u0301", "x"),
    "letters that grow": ("", "İ", ""),
    "roots of digits": ("", "√1", ""),
    "lists": ("", "[1,2,3,4],", ""),
    "lists inside one another": ("", "[", "]"),
    "torn lists": ("", "[1,", ""),
    "corners": ("", "(1,2),", ""),
    "spaces in a list": ("[1,", " ", "2]"),
    "spaces between corners": ("(1,2)", " ", "(3,4)"),
    "names": ("", '"a": ', "[1,2]"),
    "quotation marks": ("", '"', "[1,2]"),
    "letters before a number": ("[x", " ", "1,2]"),
    "groups of digits": ("", ",111", "1"),
    "number words": ("", "one ", "x"),
    "number words with a hyphen": ("", "one-", "x"),
}
"""Beginning, what is repeated, and end, which is repeated too where it closes."""
SMALL = 20_000
"""Characters; the long text has four times as many."""
NOISE_S = 0.05
"""CPU seconds below which a growth says nothing."""


def text(shape: str, size: int) -> str:
    begin, part, end = SHAPES[shape]
    count = size // len(part)
    return begin + part * count + (end * count if end in {"}", ")"} and begin == "" else end)


def seconds(parser: Callable[[str], object], written: str) -> float:
    began = time.process_time()
    parser(written)
    return time.process_time() - began


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("parser", PARSERS)
def test_four_times_the_text_takes_less_than_eight_times_the_time(parser):
    for shape in SHAPES:
        short, long = (partial(seconds, PARSERS[parser], text(shape, size)) for size in (SMALL, 4 * SMALL))
        assert not grows(short, long, 8, NOISE_S / 8), shape
