"""Tool calls in a model's text.

`hermes` is the format of Hermes and Qwen, <tool_call>{"name": ..., "arguments": {...}}</tool_call>; `gpt-oss` that of
OpenAI's open models (https://cookbook.openai.com/articles/openai-harmony). Those of other families are parsed by
sglang-router, which stands in front of the engines anyway and knows them by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slimx.data.whole import Json
from slimx.dotted import load_function
from slimx.engines.server.wire import message_of, request
from slimx.errors import SlimxError

OPENS, CLOSES = "<tool_call>", "</tool_call>"
SPACE = re.compile(r"\s*")
ATTEMPT = re.compile(
    r"<[^<>\n]{0,32}tool[^<>\n]{0,32}>|\[TOOL_CALLS\]|<\|(?:start|channel)\|>[^<>\n]{0,32} to=functions\.",
    re.IGNORECASE,
)
"""Marks by which models begin a call: an answer with one of them and without a call that can be read has tried to."""
HARMONY_ENDS = re.compile(r"<\|(?:start|end|call|return)\|>")
HARMONY_CALLS = re.compile(r"to=functions\.([^\s<>]+)")
WRITTEN_IDS = {"kimik2": re.compile(r"<\|tool_call_begin\|>\s*([^\s<>]+)\s*<\|tool_call_argument_begin\|>")}
"""Ids of calls in the text of models that write them, by parser: sglang-router leaves them out of its answer."""
ROUTER_S = 30.0
"""Seconds that the router may take to parse an answer."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asks for."""

    name: str
    arguments: str
    """A JSON object."""
    id: str | None = None
    """Id that the model wrote, by which its chat template names the result; None: the format has none."""


Parsed = tuple[str, list[ToolCall]]
"""An answer without its calls, and the calls."""
ToolParser = Callable[[str, list[Json]], Awaitable[Parsed]]
"""A function of an answer's text and the tools that it may call."""


def find_parser(name: str, router: str, headers: Mapping[str, str] = {}) -> ToolParser:
    """The parser of a name: one of PARSERS, one of the router's, or the dotted path of `def parse(text) -> (text,
    calls)`.
    `router`: its URL; `headers`: of requests to it. Raises SlimxError for a name that nobody knows."""
    key = "rollout.options.tool_parser"
    if name in PARSERS or "." in name:
        parse = PARSERS.get(name) or load_function(key, name, ("text",), is_async=False)

        async def here(text: str, tools: list[Json]) -> Parsed:
            return parse(text)

        return here
    from sglang_router.sglang_router_rs import get_available_tool_call_parsers  # late: the whole router is in it

    known = get_available_tool_call_parsers()
    if name not in known:
        raise SlimxError(
            f"{key} is {name!r}; choose a dotted path, or one of {', '.join(sorted([*PARSERS, *known]))}",
            code="proxy.tool_parser",
            about=key,
        )

    async def by_router(text: str, tools: list[Json]) -> Parsed:
        return await _ask(router, headers, name, text, tools)

    return by_router


def hermes(text: str) -> Parsed:
    """The text before the first call, and all calls. An answer with a call that is not well formed, or that was cut
    off, is text alone: who asked sees what the model wrote."""
    calls, end = [], 0
    try:
        while (start := text.find(OPENS, end)) >= 0:
            written, end = json.JSONDecoder().raw_decode(text, SPACE.match(text, start + len(OPENS)).end())
            end = SPACE.match(text, end).end()
            if not text.startswith(CLOSES, end):
                return text, []
            calls.append(_written(written))
    except (ValueError, RecursionError):
        return text, []
    return (text.partition(OPENS)[0].strip(), calls) if calls else (text, [])


def gpt_oss(text: str) -> Parsed:
    """The text for the user before the calls, and all calls; as `hermes` where a call cannot be read."""
    shown, calls = [], []
    for message in HARMONY_ENDS.split(text):
        header, _, body = message.partition("<|message|>")
        if name := HARMONY_CALLS.search(header):
            try:
                calls.append(_written({"name": name[1], "arguments": json.loads(body)}))
            except (ValueError, RecursionError):
                return text, []
        elif body and "analysis" not in header:
            shown.append(body)
    return ("".join(shown).strip(), calls) if calls else (text, [])


PARSERS: dict[str, Callable[[str], Parsed]] = {"hermes": hermes, "gpt-oss": gpt_oss}
"""Parsers that run here, by name."""


def _written(call: Any) -> ToolCall:
    """The call of a JSON value. Raises ValueError for one of which anything would be passed over."""
    if not isinstance(call, dict) or call.keys() - {"id", "type", "name", "arguments", "parameters"}:
        raise ValueError("no call")
    name, id = call.get("name"), call.get("id")
    arguments = [call[key] for key in ("arguments", "parameters") if key in call] or [{}]
    if not isinstance(name, str) or len(arguments) > 1 or not isinstance(arguments[0], dict):
        raise ValueError("no call")
    return ToolCall(
        name, json.dumps(arguments[0], ensure_ascii=False, allow_nan=False), id if isinstance(id, str) and id else None
    )


async def _ask(router: str, headers: Mapping[str, str], name: str, text: str, tools: list[Json]) -> Parsed:
    url, body = f"{router}/parse/function_call", {"text": text, "tools": tools, "tool_call_parser": name}
    status, answer = await request("POST", url, body, deadline_s=ROUTER_S, headers=headers, who="the router")
    if status != 200:
        raise SlimxError(f"POST {url} answered {status}: {message_of(answer)}")
    ids: list[str | None] = WRITTEN_IDS[name].findall(text) if name in WRITTEN_IDS else []
    functions = [call["function"] for call in answer["tool_calls"]]
    if len(ids) != len(functions):
        ids = [None] * len(functions)
    calls = [ToolCall(made["name"], made["arguments"], id) for made, id in zip(functions, ids, strict=True)]
    return (answer["remaining_text"].strip(), calls) if calls else (text, [])
