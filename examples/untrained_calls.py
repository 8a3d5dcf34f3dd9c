"""Tool parser for a policy that has learned nothing: reads any answer as a turn of the agent in `coding_agent.py`.

    rollout.options.tool_parser=examples.untrained_calls.parse

The tiny model of `examples/repair/agents.yaml` writes random characters. By their number, they mean a call of a
sub-agent, a look at a file, its repair, or the end of the work, so that rewards depend on what was sampled.
"""

from __future__ import annotations

import json

from slimx.extras.agents.proxy.tool_calls import ToolCall

TURNS = (
    ToolCall("delegate", json.dumps({"task": "Find the comparison in intervals.py."})),
    ToolCall("shell", json.dumps({"command": "cat intervals.py"})),
    ToolCall("shell", json.dumps({"command": "sed -i 's/start < /start <= /' intervals.py"})),
    None,
)
"""Turns by the number of characters modulo 4; None has no call."""


def parse(text: str) -> tuple[str, list[ToolCall]]:
    """Returns the text, and the call that its length stands for, if any."""
    call = TURNS[len(text) % len(TURNS)]
    return text, [] if call is None else [call]
