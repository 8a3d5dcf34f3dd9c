"""Calls of tools as a model writes them: for modules that whole runs import, so nothing heavy here."""

from __future__ import annotations

import json
from typing import Any


def calling(name: str, /, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
