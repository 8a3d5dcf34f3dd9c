"""Finds answers and programs in what a model wrote."""

from __future__ import annotations

import re


def marked_answer(text: str) -> str | None:
    """The text between <answer> and </answer>; None if there is none or more than one: who gives several answers has
    not answered."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[0].strip() if len(found) == 1 else None


def last_program(text: str) -> str | None:
    """The last fenced block of Python (or of no language); None if there is none."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL | re.IGNORECASE)
    return blocks[-1] if blocks else None
