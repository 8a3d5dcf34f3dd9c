"""Parsers of the tool calls in a model's text.

`hermes` is the format of Hermes and Qwen, <tool_call>{"name": ..., "arguments": {...}}</tool_call>; `gpt-oss` is the
format of OpenAI's open models (https://cookbook.openai.com/articles/openai-harmony). sglang-router, which runs in front
of the engines, parses the formats of other model families.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from slimx.dotted import load_function
from slimx.engines.server.http_calls import message_of, request
from slimx.errors import SlimxError
from slimx.json_types import Json

OPENS = "<tool_call>"
CLOSES = "</tool_call>"
SPACE = re.compile(r"\s*")
ATTEMPT = re.compile(
    r"<[^<>\n]{0,32}tool[^<>\n]{0,32}>|\[TOOL_CALLS\]|<\|(?:start|channel)\|>[^<>\n]{0,32} to=functions\.",
    re.IGNORECASE,
)
"""Pattern of the start of a tool call. A response that matches it contains an attempted call, even if no call can be
parsed."""
HARMONY_ENDS = re.compile(r"<\|(?:start|end|call|return)\|>")
HARMONY_CALLS = re.compile(r"to=functions\.([^\s<>]+)")
WRITTEN_IDS = {"kimik2": re.compile(r"<\|tool_call_begin\|>\s*([^\s<>]+)\s*<\|tool_call_argument_begin\|>")}
"""Parser name -> pattern with which call ids are read from a model's text, because sglang-router omits them."""
ROUTER_S = 30.0
"""Seconds within which the router must parse a response."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call made by the model."""

    name: str
    arguments: str
    """Arguments of the call, as the text of a JSON object."""
    id: str | None = None
    """Id that the model wrote, which its chat template repeats with the result; None if the format has no ids."""


Parsed = tuple[str, list[ToolCall]]
"""Text of a response without its tool calls, and the list of these calls."""
ToolParser = Callable[[str, list[Json]], Awaitable[Parsed]]
"""Function that parses a response's text, given the tools that the response may call."""


def find_parser(name: str, router: str, headers: Mapping[str, str] = {}) -> ToolParser:
    """Returns the parser called `name`: one of `PARSERS`, one of the router's, or the dotted path of a function
    `parse(text) -> (text, calls)`.

    `router`: URL of the router. `headers`: headers of requests to it. Raises SlimxError for an unknown name.
    """
    key = "rollout.options.tool_parser"
    if name in PARSERS or "." in name:
        parse = PARSERS.get(name) or load_function(key, name, ("text",), is_async=False)

        async def parse_here(text: str, tools: list[Json]) -> Parsed:
            return parse(text)

        return parse_here
    from sglang_router.sglang_router_rs import (
        get_available_tool_call_parsers,
    )  # imported here, because it loads the whole router

    known = get_available_tool_call_parsers()
    if name not in known:
        raise SlimxError(
            f"{key}={name!r} is not a known parser; set {key} to a dotted path or to one of "
            f"{', '.join(sorted([*PARSERS, *known]))}",
            code="proxy.tool_parser",
            about=key,
        )

    async def parse_by_router(text: str, tools: list[Json]) -> Parsed:
        return await _request(router, headers, name, text, tools)

    return parse_by_router


def hermes(text: str) -> Parsed:
    """Returns the text before the first tool call, and all calls. If any call is malformed or truncated, returns the
    whole text and no calls."""
    calls: list[ToolCall] = []
    end = 0
    try:
        while (start := text.find(OPENS, end)) >= 0:
            call, end = json.JSONDecoder().raw_decode(text, _skip_space(text, start + len(OPENS)))
            end = _skip_space(text, end)
            if not text.startswith(CLOSES, end):
                return text, []
            calls.append(_tool_call(call))
    except (ValueError, RecursionError):
        return text, []
    if not calls:
        return text, []
    return text.partition(OPENS)[0].strip(), calls


def gpt_oss(text: str) -> Parsed:
    """Returns the text for the user, and all tool calls. If any call is malformed, returns the whole text and no
    calls."""
    content = ""
    calls: list[ToolCall] = []
    for message in HARMONY_ENDS.split(text):
        header, _, body = message.partition("<|message|>")
        name = HARMONY_CALLS.search(header)
        if name is not None:
            try:
                calls.append(_tool_call({"name": name[1], "arguments": json.loads(body)}))
            except (ValueError, RecursionError):
                return text, []
        elif body and "analysis" not in header:
            content += body
    if not calls:
        return text, []
    return content.strip(), calls


PARSERS: dict[str, Callable[[str], Parsed]] = {"hermes": hermes, "gpt-oss": gpt_oss}
"""Parsers that run in this process, by name."""


def _skip_space(text: str, start: int) -> int:
    return SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches the empty text too


def _tool_call(call: object) -> ToolCall:
    """Converts a JSON value to a tool call. Raises ValueError if the value is not a tool call, or has keys that would
    be ignored."""
    if not isinstance(call, dict) or call.keys() - {"id", "type", "name", "arguments", "parameters"}:
        raise ValueError("not a call")
    name = call.get("name")
    arguments = [call[key] for key in ("arguments", "parameters") if key in call] or [{}]
    if not isinstance(name, str) or len(arguments) > 1 or not isinstance(arguments[0], dict):
        raise ValueError("not a call")
    id = call.get("id")
    if not isinstance(id, str) or not id:
        id = None
    return ToolCall(name, json.dumps(arguments[0], ensure_ascii=False, allow_nan=False), id)


async def _request(router: str, headers: Mapping[str, str], name: str, text: str, tools: list[Json]) -> Parsed:
    url = f"{router}/parse/function_call"
    body = {"text": text, "tools": tools, "tool_call_parser": name}
    status, response = await request("POST", url, body, deadline_s=ROUTER_S, headers=headers, server_name="the router")
    if status != 200:
        raise SlimxError(f"POST {url} answered {status}: {message_of(response)}")
    ids: list[str | None] = WRITTEN_IDS[name].findall(text) if name in WRITTEN_IDS else []
    functions = [call["function"] for call in response["tool_calls"]]
    if len(ids) != len(functions):
        ids = [None] * len(functions)
    calls = [ToolCall(function["name"], function["arguments"], id) for function, id in zip(functions, ids, strict=True)]
    if not calls:
        return text, []
    return response["remaining_text"].strip(), calls
