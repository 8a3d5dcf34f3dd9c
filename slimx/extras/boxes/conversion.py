"""Extracts the field and the reason from the errors of msgspec's conversions."""

from __future__ import annotations

import re

import msgspec


def refused_field(error: msgspec.ValidationError) -> tuple[str, str]:
    """Returns the dotted name of the field that msgspec refused to convert, and the reason."""
    reason, _, path = str(error).partition(" - at `$.")
    field = re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", reason)
    if field is None:
        return re.sub(r"\[.*", "", path.rstrip("`")), reason
    name = ".".join(filter(None, (path[:-1], field[2])))
    if field[1] == "missing required":
        return name, "is missing"
    return name, "is unknown; docs/sandboxes.md lists the options"
