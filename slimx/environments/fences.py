"""Finds programs in what a model wrote."""

from __future__ import annotations

import re


def last_program(text: str) -> str | None:
    """The last fenced block of Python (or of no language); None if there is none."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL | re.IGNORECASE)
    return blocks[-1] if blocks else None
