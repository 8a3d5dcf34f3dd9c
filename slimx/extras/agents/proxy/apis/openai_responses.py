"""OpenAI's responses as agents ask for them and get them: items of text, reasoning and calls, whole or as events.

The names are those of OpenAI's API reference for /v1/responses. Nothing is stored: every request brings all items.
"""

from __future__ import annotations

import json
from typing import Any

from slimx.extras.agents.proxy.apis.wire import AnswerWriter, Wire
from slimx.extras.agents.proxy.errors import ApiError, invalid, unsupported
from slimx.extras.agents.proxy.request import (
    ChatRequest,
    Json,
    Message,
    as_object,
    fields_of,
    most_tokens,
    overridden_by_run,
    read_choice,
    read_message,
    required,
    type_of,
    typed,
)
from slimx.rollout.client.completion import Completion

IGNORED = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""Parameters that change nothing: they are about OpenAI's service."""
NEUTRAL = {"background": False, "top_logprobs": 0, "truncation": "disabled"}
"""Parameters of which only this value (and null) can be carried out."""
CARRIED_OUT = frozenset(
    {
        "input",
        "instructions",
        "max_output_tokens",
        "model",
        "parallel_tool_calls",
        "stream",
        "temperature",
        "tool_choice",
        "tools",
        "top_p",
    }
)
NOT_DONE = {"include", "reasoning", "text"}
"""Parameters that agents send by default. Some of their values have no effect, which the rollout notes."""
SERVICE_TOOLS = ("web_search", "web_search_preview")
"""Tools of OpenAI's service that agents offer by default. The model is not told of them."""


def read_responses(body: Any, sampling: Json, *, strict: bool) -> ChatRequest:
    """The request in a JSON body. Raises ApiError for what cannot be carried out."""
    given = fields_of(body, IGNORED | CARRIED_OUT | NOT_DONE, NEUTRAL)
    asked = typed(given, "tools", list, [])
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(asked) if not _of_service(tool)]
    calls_tools, forced = read_choice(given, tools)
    return ChatRequest(
        messages=_messages(given),
        model=typed(given, "model", str, ""),
        tools=tools or None,
        calls_tools=bool(tools) and calls_tools,
        forced=forced,
        max_tokens=most_tokens(given, "max_output_tokens"),
        stream=typed(given, "stream", bool, False),
        overridden=overridden_by_run(given, sampling, strict=strict) + _not_done(given, asked),
    )


class ResponseWriter(AnswerWriter):
    """Writes one response."""

    _events = 0
    """Events so far: each has its number."""

    def whole(self, message: Message, completion: Completion) -> Json:
        """The answer in one."""
        cut = completion.finish_reason == "length"
        return self._frame("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items(message, "incomplete" if cut else "completed"),
            "usage": self._usage(completion),
        }

    def begin(self) -> bytes:
        """The events before all items."""
        frame = self._frame("in_progress")
        return self._event("response.created", response=frame) + self._event("response.in_progress", response=frame)

    def piece(self, shown: str, piece: Completion) -> bytes:
        """A piece of text, in an item that begins with the first."""
        if not shown:
            return b""
        out = b"" if self._open else self._begin_text(0)
        self._open = True
        return out + self._text_event("output_text.delta", 0, delta=shown, logprobs=[])

    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """The items that are left, and the whole response."""
        response = self.whole(message, completion)
        out = self.piece(rest, completion) if rest else b""
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                part = item["content"][0]
                if not self._open:
                    out += self._begin_text(index)
                    out += self._text_event("output_text.delta", index, delta=part["text"], logprobs=[])
                out += self._text_event("output_text.done", index, text=part["text"], logprobs=[])
                out += self._text_event("content_part.done", index, part=part)
            else:
                out += self._begin_item(index, item)
            out += self._event("response.output_item.done", output_index=index, item=item)
        return out + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """The event response.failed."""
        told = {"error": {"code": error.code, "message": str(error)}}
        return self._event("response.failed", response=self._frame("failed") | told)

    def _begin_item(self, index: int, item: Json) -> bytes:
        """An item other than text, up to its end."""
        if item["type"] == "reasoning":
            return self._event("response.output_item.added", output_index=index, item=item)
        start = {**item, "arguments": "", "status": "in_progress"}
        place = {"output_index": index, "item_id": item["id"]}
        return (
            self._event("response.output_item.added", output_index=index, item=start)
            + self._event("response.function_call_arguments.delta", delta=item["arguments"], **place)
            + self._event(
                "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"], **place
            )
        )

    def _begin_text(self, index: int) -> bytes:
        item = self._text_item("", "in_progress")
        part = item["content"][0]
        added = self._event("response.output_item.added", output_index=index, item={**item, "content": []})
        return added + self._text_event("content_part.added", index, part=part)

    def _text_event(self, what: str, index: int, **data: Any) -> bytes:
        place = {"output_index": index, "item_id": self._text_id, "content_index": 0}
        return self._event(f"response.{what}", **place, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        told = {"type": kind, "sequence_number": self._events, **data}
        self._events += 1
        return f"event: {kind}\ndata: {json.dumps(told)}\n\n".encode()

    def _frame(self, status: str) -> Json:
        request = self.request
        tools = [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools or []]
        return {
            "id": f"resp_{self.number}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": request.model,
            "output": [],
            "parallel_tool_calls": request.forced is None or not request.forced.once,
            "tools": tools,
            "tool_choice": self._choice(bool(tools)),
            "usage": None,
        }

    def _choice(self, tools: bool) -> Any:
        """The request's tool_choice."""
        forced = self.request.forced
        if forced is None:
            return "auto" if self.request.calls_tools or not tools else "none"
        return {"type": "function", "name": forced.names[0]} if len(forced.names) == 1 else "required"

    @property
    def _text_id(self) -> str:
        return f"msg_{self.number}"

    def _text_item(self, text: str, status: str) -> Json:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        return {"type": "message", "id": self._text_id, "role": "assistant", "status": status, "content": content}

    def _items(self, message: Message, status: str) -> list[Json]:
        out: list[Json] = []
        if thought := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thought}]
            out.append({"type": "reasoning", "id": f"rs_{self.number}", "summary": [], "content": content})
        calls = message.get("tool_calls", [])
        if message.get("content") or not calls:
            out.append(self._text_item(message.get("content") or "", status))
        for index, call in enumerate(calls):
            told = {"type": "function_call", "id": f"fc_{self.number}_{index}", "call_id": call["id"]}
            out.append({**told, **call["function"], "status": "completed"})
        return out

    def _usage(self, completion: Completion) -> Json:
        sampled = len(completion.token_ids)
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": completion.cached_tokens},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt + sampled,
        }


def _of_service(tool: Any) -> bool:
    return type_of(tool) in SERVICE_TOOLS


def _not_done(given: Json, tools: list[Any]) -> tuple[str, ...]:
    """Names of default requests of agents that have no effect here: a reasoning effort, a summary or encrypted
    reasoning, a verbosity, a search by the service. Raises ApiError for a request that an agent would miss."""
    include, text, reasoning = given.get("include", []), given.get("text", {}), typed(given, "reasoning", dict, {})
    if include not in ([], ["reasoning.encrypted_content"]):
        raise unsupported("include", f"{json.dumps(include)} is not supported; leave it out")
    if not isinstance(text, dict) or text.get("format") not in (None, {"type": "text"}):
        raise unsupported("text", f"{json.dumps(text)} is not supported; only plain text is")
    asked = {
        "include": bool(include),
        "reasoning": any(value is not None for value in reasoning.values()),
        "text.verbosity": text.get("verbosity") is not None,
        **{f"tools.{tool['type']}": True for tool in tools if _of_service(tool)},
    }
    return tuple(name for name, is_asked in asked.items() if is_asked)


def _messages(given: Json) -> list[Message]:
    items = given.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise invalid("input", "is no string or list")
    out: list[Message] = []
    if "instructions" in given:
        out.append(_message({"role": "system", "content": given["instructions"]}, "instructions"))
    for number, item in enumerate(items):
        _add(out, item, f"input[{number}]")
    if not items or out[-1]["role"] == "assistant":
        raise invalid("input", "must end with an item that the assistant answers")
    return out


def _add(out: list[Message], item: Any, where: str) -> None:
    """Add an item of the API to the messages of chat templates: calls belong to the answer before them. Past reasoning
    is left out: a template shows it its own way, or not at all."""
    kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
    if kind == "message":
        out.append(_message(item, where))
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "function": {name: item.get(name) for name in ("name", "arguments")}}
        if not all(isinstance(text, str) for text in (call["id"], *call["function"].values())):
            raise invalid(where, "has no call_id, name, arguments")
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": ""})
        read = read_message({"role": "assistant", "tool_calls": [call]}, where)["tool_calls"]
        out[-1]["tool_calls"] = [*out[-1].get("tool_calls", []), *read]
    elif kind == "function_call_output":
        answered = {"tool_call_id": required(item, "call_id", str, where)}
        out.append(_message({"role": "tool", "content": item.get("output")}, where) | answered)
    elif kind != "reasoning":
        raise unsupported(where, f"is of type {kind}, which is not supported")


def _message(item: Json, where: str) -> Message:
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    elif not isinstance(content, str):
        raise invalid(f"{where}.content", "is no text")
    return read_message({"role": item.get("role"), "content": content}, where)


def _part(part: Any) -> Any:
    """A part of text as chat completions tell it; others are left for these to refuse."""
    if type_of(part) in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    return part


def _tool(tool: Any, where: str) -> Json:
    """A tool as chat templates want it."""
    if type_of(as_object(tool, where)) != "function":
        what = f"is {type_of(tool)}; only functions, which the agent itself carries out, are supported"
        raise unsupported(f"{where}.type", what)
    required(tool, "name", str, where)
    typed(tool, "parameters", dict, {}, where)
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


RESPONSES = Wire(read_responses, ResponseWriter)
"""The API /v1/responses."""
