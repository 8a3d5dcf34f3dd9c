"""Errors of msgspec's conversions, by the field of a configuration or a task."""

from __future__ import annotations

import re

import msgspec


def place_of(error: msgspec.ValidationError) -> tuple[str, str]:
    """Dotted name of the field that a conversion has refused, and what is wrong with it."""
    what, _, path = str(error).partition(" - at `$.")
    if (field := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", what)) is not None:
        said = "is missing" if field[1] == "missing required" else "is unknown; docs/sandboxes.md lists what there is"
        return ".".join(filter(None, (path[:-1], field[2]))), said
    return re.sub(r"\[.*", "", path.rstrip("`")), what
