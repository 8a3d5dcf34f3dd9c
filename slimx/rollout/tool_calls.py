"""Tool calls in a model's text, in the format of Hermes and Qwen:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>

For models that write them otherwise, name a function of the same form in `rollout.options.tool_parser`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asks for."""

    name: str
    arguments: str
    """A JSON object."""


ToolParser = Callable[[str], tuple[str, list[ToolCall]]]
"""From an answer to its text without the calls, and the calls."""


def hermes(text: str) -> tuple[str, list[ToolCall]]:
    """The text before the first call, and all calls. An answer with a call that is not well formed, or that was cut
    off, is text alone: who asked sees what the model wrote."""
    calls, found = [], CALL.findall(text)
    if text.count("<tool_call>") != len(found):
        return text, []
    for written in found:
        try:
            call = json.loads(written)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return text, []
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return text, []
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
    return (text.partition("<tool_call>")[0].strip(), calls) if calls else (text, [])
