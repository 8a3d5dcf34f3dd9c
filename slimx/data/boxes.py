"""Finds the \\boxed{...} in which mathematical texts put their answers."""

from __future__ import annotations

import re


def boxes(text: str) -> list[tuple[int, int]]:
    """(start, end) of every \\boxed{...} whose braces are balanced, in the order in which they begin."""
    found: list[tuple[int, int]] = []
    for box in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for stop in range(box.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[stop], 0)
            if depth == 0:
                found.append((box.start(), stop + 1))
                break
    return found
