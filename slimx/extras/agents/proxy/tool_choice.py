"""Tools that an agent lets the model call, or makes it call; the grammar by which an engine makes it.

A grammar is written as a structural tag (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html) and sent as EBNF:
SGLang takes both, sglang-router passes only the second on and drops the first without a word.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimx.data.whole import Json
from slimx.extras.agents.proxy.errors import invalid

GRAMMARS = ("hermes", "qwen")
"""Tool parsers whose format has a grammar here: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
DEPTH, LENGTH = 32, 65536
"""Levels and bytes of a schema, at most: the engine compiles it, beside which all other requests wait."""
Tools = Sequence[Json]


@dataclass(frozen=True, slots=True)
class Forced:
    """The calls that an answer must consist of."""

    names: tuple[str, ...]
    """Tools that may be called."""
    once: bool
    """True for exactly one call, False for one or more."""


def forced_by(tools: Tools, name: str | None, *, once: bool) -> Forced:
    """The forced calls of a request. `name`: the one tool to call; None: any of `tools`, once or several times.

    Raises ApiError if there is no such tool."""
    known = [_name(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    if not known:
        raise invalid("tool_choice", "forces a tool, and the request has no tools")
    if name is None:
        return Forced(tuple(known), once)
    if name not in known:
        raise invalid("tool_choice", f"forces {name!r}, which is none of tools: {', '.join(known)}")
    return Forced((name,), True)


def grammar(forced: Forced, tools: Tools, *, thinks: bool) -> str:
    """The EBNF of an answer that is nothing but the forced calls, with arguments of their schemas. `thinks`: the answer
    begins with reasoning, up to </think>. Raises ApiError for a schema of which no grammar can be made."""
    from xgrammar import Grammar  # takes seconds, and hardly any agent forces a tool

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
    except RuntimeError as error:  # what xgrammar raises whatever is wrong
        raise invalid("tools", f"have parameters of which no grammar can be made: {str(error).strip()}") from error


def _name(tool: Any, where: str) -> str:
    """The name of a function whose arguments a grammar can be made of."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(where, "has no function.name")
    schema = function.get("parameters") or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise invalid(f"{where}.function.parameters", "is no schema of an object")
    if _depth(schema) > DEPTH or len(json.dumps(schema)) > LENGTH:
        what = f"is a schema of more than {DEPTH} levels or {LENGTH} bytes, and is not forced"
        raise invalid(f"{where}.function.parameters", what)
    return function["name"]


def _depth(value: Any) -> int:
    """Levels of lists and objects inside one another; counting ends above DEPTH."""
    level, depth = [value], 0
    while level and depth <= DEPTH:
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level, depth = [value for values in inner for value in values], depth + bool(inner)
    return depth


def _tag(name: str, schema: Any) -> Json:
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": {"type": "object", **schema}},
        "end": "}\n</tool_call>",
    }
