"""OpenAI's responses API: requests, and responses of text, reasoning and call items, as a whole or as events.

Names are those of OpenAI's API reference for /v1/responses. Responses are not stored, so every request must contain all
items of the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from slimx.extras.agents.proxy.apis.base import AnswerWriter, ChatApi
from slimx.extras.agents.proxy.bodies import encoded
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
"""Parameters that are accepted without effect, because they concern only OpenAI's hosted service."""
NEUTRAL = {"background": False, "top_logprobs": 0, "truncation": "disabled"}
"""Unsupported parameters and their neutral values: a request may set each parameter only to null or to its neutral
value."""
SUPPORTED = frozenset(
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
PARTLY_IGNORED = {"include", "reasoning", "text"}
"""Parameters that agents send by default and of which some values are ignored; the rollout's metadata lists the ignored
ones."""
SERVICE_TOOLS = ("web_search", "web_search_preview")
"""Tools of OpenAI's service that agents offer by default. They are removed from the prompt."""


def read_responses(body: Any, sampling: Json, *, strict: bool, images: Collection[str] | None = None) -> ChatRequest:
    """Parses the JSON body of a request.

    `sampling`: the run's sampling parameters. `strict`: True to refuse values that differ from the run's instead of
    overriding them. `images`: as in `content_of`. Raises ApiError for an invalid or unsupported request.
    """
    fields = fields_of(body, IGNORED | SUPPORTED | PARTLY_IGNORED, NEUTRAL)
    all_tools = typed(fields, "tools", list, [])
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(all_tools) if not _of_service(tool)]
    calls_tools, forced = read_choice(fields, tools)
    return ChatRequest(
        messages=_messages(fields, images),
        model=typed(fields, "model", str, ""),
        tools=tools or None,
        calls_tools=bool(tools) and calls_tools,
        forced=forced,
        max_tokens=most_tokens(fields, "max_output_tokens"),
        stream=typed(fields, "stream", bool, False),
        overridden=overridden_by_run(fields, sampling, strict=strict) + _ignored(fields, all_tools),
    )


class ResponseWriter(AnswerWriter):
    """Writer of one response in the format of OpenAI's Responses API."""

    _events = 0
    """Number of events so far, which is the next sequence number."""

    def complete(self, message: Message, completion: Completion) -> Json:
        """Returns the JSON body of the response to a non-streaming request."""
        status = "completed"
        details = None
        if completion.finish_reason == "length":
            status = "incomplete"
            details = {"reason": "max_output_tokens"}
        return self._frame(status) | {
            "incomplete_details": details,
            "output": self._items(message, status),
            "usage": self._usage(completion),
        }

    def begin(self) -> bytes:
        """Returns the events that precede the first output item."""
        frame = self._frame("in_progress")
        return self._event("response.created", response=frame) + self._event("response.in_progress", response=frame)

    def piece(self, shown: str, piece: Completion) -> bytes:
        """Returns the events that send a piece of text; the first piece also opens a text item."""
        if not shown:
            return b""
        out = b""
        if not self._open:
            out += self._begin_text(0)
        self._open = True
        return out + self._text_event("output_text.delta", 0, delta=shown, logprobs=[])

    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """Returns the events that send the remaining items, followed by the final event, which contains the whole
        response."""
        response = self.complete(message, completion)
        out = b""
        if rest:
            out += self.piece(rest, completion)
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
        """Returns the event response.failed."""
        response = self._frame("failed") | {"error": {"code": error.code, "message": str(error)}}
        return self._event("response.failed", response=response)

    def _begin_item(self, index: int, item: Json) -> bytes:
        """Returns the events that send a reasoning or call item, except the event that ends it."""
        if item["type"] == "reasoning":
            return self._event("response.output_item.added", output_index=index, item=item)
        start = {**item, "arguments": "", "status": "in_progress"}
        keys = {"output_index": index, "item_id": item["id"]}
        return (
            self._event("response.output_item.added", output_index=index, item=start)
            + self._event("response.function_call_arguments.delta", delta=item["arguments"], **keys)
            + self._event(
                "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"], **keys
            )
        )

    def _begin_text(self, index: int) -> bytes:
        item = self._text_item("", "in_progress")
        part = item["content"][0]
        added = self._event("response.output_item.added", output_index=index, item={**item, "content": []})
        return added + self._text_event("content_part.added", index, part=part)

    def _text_event(self, kind: str, index: int, **data: object) -> bytes:
        keys = {"output_index": index, "item_id": self._text_id, "content_index": 0}
        return self._event(f"response.{kind}", **keys, **data)

    def _event(self, kind: str, **data: object) -> bytes:
        event = {"type": kind, "sequence_number": self._events, **data}
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encoded(event))

    def _frame(self, status: str) -> Json:
        request = self.request
        tools = [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools or []]
        return {
            "id": f"resp_{self.index}",
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

    def _choice(self, has_tools: bool) -> str | Json:
        """Returns the `tool_choice` that the response repeats."""
        forced = self.request.forced
        if forced is None:
            return "auto" if self.request.calls_tools or not has_tools else "none"
        if len(forced.names) == 1:
            return {"type": "function", "name": forced.names[0]}
        return "required"

    @property
    def _text_id(self) -> str:
        return f"msg_{self.index}"

    def _text_item(self, text: str, status: str) -> Json:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        return {"type": "message", "id": self._text_id, "role": "assistant", "status": status, "content": content}

    def _items(self, message: Message, status: str) -> list[Json]:
        out: list[Json] = []
        if message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
            out.append({"type": "reasoning", "id": f"rs_{self.index}", "summary": [], "content": content})
        calls = message.get("tool_calls", [])
        if message.get("content") or not calls:
            out.append(self._text_item(message.get("content") or "", status))
        for index, call in enumerate(calls):
            item = {"type": "function_call", "id": f"fc_{self.index}_{index}", "call_id": call["id"]}
            out.append({**item, **call["function"], "status": "completed"})
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


def _of_service(tool: object) -> bool:
    return type_of(tool) in SERVICE_TOOLS


def _ignored(fields: Json, tools: list[Any]) -> tuple[str, ...]:
    """Returns the names of requested features that are ignored: reasoning effort, summaries and encrypted reasoning,
    verbosity, and searches by the service, which agents request by default.

    Raises ApiError for unsupported features that an agent depends on.
    """
    include = fields.get("include", [])
    text = fields.get("text", {})
    reasoning = typed(fields, "reasoning", dict, {})
    if include not in ([], ["reasoning.encrypted_content"]):
        raise unsupported("include", f"{json.dumps(include)} is not supported; remove it")
    if not isinstance(text, dict) or text.get("format") not in (None, {"type": "text"}):
        raise unsupported("text", f"{json.dumps(text)} is not supported; only plain text can be requested")
    ignored = []
    if include:
        ignored.append("include")
    if any(value is not None for value in reasoning.values()):
        ignored.append("reasoning")
    if text.get("verbosity") is not None:
        ignored.append("text.verbosity")
    for tool in tools:
        if _of_service(tool) and f"tools.{tool['type']}" not in ignored:
            ignored.append(f"tools.{tool['type']}")
    return tuple(ignored)


def _messages(fields: Json, images: Collection[str] | None) -> list[Message]:
    items = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise invalid("input", "must be a string or a list of items")
    out: list[Message] = []
    if "instructions" in fields:
        out.append(_message({"role": "system", "content": fields["instructions"]}, "instructions"))
    for index, item in enumerate(items):
        _add(out, item, f"input[{index}]", images)
    if not items or not out or out[-1]["role"] == "assistant":
        raise invalid("input", "is empty or ends with an item of the assistant; append a user message")
    return out


def _add(out: list[Message], item: Any, path: str, images: Collection[str] | None) -> None:
    """Converts an input item and appends it to the chat template's messages; a function call is merged into the
    preceding assistant message.

    Omits past reasoning, which chat templates render differently or not at all.
    """
    kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
    if kind == "message":
        out.append(_message(item, path, images))
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "function": function}
        if not all(isinstance(text, str) for text in (call["id"], *function.values())):
            raise invalid(path, "must have the fields call_id, name and arguments, each with a string")
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": ""})
        read = read_message({"role": "assistant", "tool_calls": [call]}, path)["tool_calls"]
        out[-1]["tool_calls"] = [*out[-1].get("tool_calls", []), *read]
    elif kind == "function_call_output":
        id = required(item, "call_id", str, path)
        result = _message({"role": "tool", "content": item.get("output")}, path, images)
        out.append(result | {"tool_call_id": id})
    elif kind != "reasoning":
        raise unsupported(path, f"is of type {kind}, which is not supported")


def _message(item: Json, path: str, images: Collection[str] | None = None) -> Message:
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    elif not isinstance(content, str):
        raise invalid(f"{path}.content", "is not text")
    return read_message({"role": item.get("role"), "content": content}, path, images=images)


def _part(part: Any) -> Any:
    """Converts a text part to the Chat Completions format. Returns other parts unchanged, for
    `read_message`."""
    if type_of(part) in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    return part


def _tool(tool: object, path: str) -> Json:
    """Converts a tool to the chat template's format. `path`: location of the tool in the request, for error
    messages."""
    declaration = as_object(tool, path)
    if type_of(declaration) != "function":
        problem = f"is {type_of(declaration)}; only functions, which the agent itself executes, are supported"
        raise unsupported(f"{path}.type", problem)
    required(declaration, "name", str, path)
    typed(declaration, "parameters", dict, {}, path)
    function = {}
    for name in ("name", "description", "parameters"):
        if declaration.get(name) is not None:
            function[name] = declaration[name]
    return {"type": "function", "function": function}


RESPONSES = ChatApi(read_responses, ResponseWriter)
"""Parser, writer and error format for OpenAI's endpoint /v1/responses."""
