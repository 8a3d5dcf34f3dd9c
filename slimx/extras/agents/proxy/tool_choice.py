"""Forced tool calls (`tool_choice`), and the grammar that makes an engine sample them.

The grammar is built as a structural tag (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html) and sent as EBNF.
SGLang accepts both, but sglang-router forwards only EBNF and silently drops structural tags.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from slimx.extras.agents.proxy.errors import invalid
from slimx.json_types import Json

GRAMMARS = ("hermes", "qwen")
"""Names of the tool parsers whose format can be forced with a grammar: <tool_call>{"name": ..., "arguments":
{...}}</tool_call>."""
DEPTH = 32
"""Maximum nesting depth of a schema, limited because all other requests wait while the engine compiles the schema."""
LENGTH = 65536
"""Maximum length of a schema as JSON, in characters."""
Tools = Sequence[Json]


@dataclass(frozen=True, slots=True)
class Forced:
    """Constraint that a response consist of tool calls only."""

    names: tuple[str, ...]
    """Names of the tools that may be called."""
    once: bool
    """True for exactly one call, False for one or more calls."""


def forced_by(tools: Tools, name: str | None, *, once: bool) -> Forced:
    """Returns the forced calls of a request.

    `tools`: tools of the request. `name`: the only tool that may be called; None for any of `tools`. `once`: True for
    exactly one call. Raises ApiError if there is no such tool.
    """
    known = [_name(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if not known:
        raise invalid("tool_choice", "forces a tool, but the request has no tools; add tools, or remove tool_choice")
    if name is None:
        return Forced(tuple(known), once)
    if name not in known:
        raise invalid("tool_choice", f"forces {name!r}, which is not in tools; use one of {', '.join(known)}")
    return Forced((name,), True)


def grammar(forced: Forced, tools: Tools, *, thinks: bool) -> str:
    """Returns the EBNF grammar for a response that consists of the forced calls, with arguments that match the tools'
    schemas.

    `thinks`: True if the response starts with reasoning, up to </think>. Raises ApiError for a schema that no grammar
    can express.
    """
    from xgrammar import Grammar  # imported here, because that takes seconds and few agents force a tool

    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls: Json = {
        "type": "tags_with_separator",
        "tags": [_tag(name, schemas[name]) for name in forced.names],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": forced.once,
    }
    if thinks:
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>\n\n"}
        calls = {"type": "sequence", "elements": [thought, calls]}
    try:
        return str(Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": calls})))
    except RuntimeError as error:  # the only error that xgrammar raises
        raise invalid(
            "tools",
            f"have parameters that no grammar can express ({str(error).strip()}); simplify them, or set tool_choice "
            "to auto",
        ) from error


def _name(tool: object, path: str) -> str:
    """Returns the name of a tool. Raises ApiError, with the location `path`, for a tool that cannot be forced."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(path, "has no function.name")
    schema = function.get("parameters") or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise invalid(f"{path}.function.parameters", "must be a JSON schema of type object")
    if _depth(schema) > DEPTH or len(json.dumps(schema)) > LENGTH:
        problem = f"has more than {DEPTH} levels or {LENGTH} characters, so the tool cannot be forced"
        raise invalid(f"{path}.function.parameters", problem)
    return function["name"]


def _depth(value: object) -> int:
    """Returns the nesting depth of lists and objects; stops counting above `DEPTH`."""
    depth = 0
    level = [value]
    while depth <= DEPTH:
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            break
        depth += 1
        level = []
        for container in containers:
            level.extend(container.values() if isinstance(container, dict) else container)
    return depth


def _tag(name: str, schema: Json) -> Json:
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": {"type": "object", **schema}},
        "end": "}\n</tool_call>",
    }
