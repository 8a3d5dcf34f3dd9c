"""Finds answers and programs in what a model wrote."""

from __future__ import annotations

import re


def marked_answer(text: str) -> str | None:
    """The text between <answer> and </answer>; None if there is none or more than one: who gives several answers has
    not answered."""
    found, end = [], 0
    # By str.find, as an expression would look for the end once more behind each <answer> that has none.
    while (start := text.find("<answer>", end)) >= 0 and (close := text.find("</answer>", start)) >= 0:
        found.append(text[start + len("<answer>") : close])
        end = close + len("</answer>")
    return found[0].strip() if len(found) == 1 else None


def last_program(text: str) -> str | None:
    """The last fenced block of Python (or of no language); None if there is none."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL | re.IGNORECASE)
    return blocks[-1] if blocks else None
