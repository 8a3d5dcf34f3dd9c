"""Anthropic's messages API: requests, and responses of text, thinking and tool blocks, as a whole or as events.

Names are those of Anthropic's API reference for /v1/messages.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from typing import Any

from slimx.extras.agents.proxy.apis.base import AnswerWriter, ChatApi
from slimx.extras.agents.proxy.bodies import decoded, encoded
from slimx.extras.agents.proxy.errors import ApiError, invalid, unsupported
from slimx.extras.agents.proxy.request import (
    ChatRequest,
    Json,
    Message,
    as_object,
    check_stop,
    content_of,
    fields_of,
    most_tokens,
    overridden_by_run,
    required,
    text_of,
    type_of,
    typed,
)
from slimx.extras.agents.proxy.tool_choice import Forced, forced_by
from slimx.rollout.client.completion import Completion

STOP_SEQUENCES = 16
"""Maximum number of stop sequences per request."""
IGNORED = frozenset({"cache_control", "metadata", "service_tier"})
"""Parameters that are accepted without effect, because they concern only Anthropic's hosted service."""
SUPPORTED = frozenset(
    {
        "context_management",
        "max_tokens",
        "messages",
        "model",
        "output_config",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_p",
    }
)
ERRORS = {404: "not_found_error", 413: "request_too_large", 504: "timeout_error"}


def read_messages(
    body: Any, sampling: Json, *, strict: bool, images: Collection[str] | None = None, counts: bool = False
) -> ChatRequest:
    """Parses the JSON body of a request.

    `sampling`: the run's sampling parameters. `strict`: True to refuse values that differ from the run's instead of
    overriding them. `images`: as in `content_of`. `counts`: True for a request that only counts tokens, where
    max_tokens is optional. Raises ApiError for an invalid or unsupported request.
    """
    fields = fields_of(body, IGNORED | SUPPORTED, {})
    if not counts and "max_tokens" not in fields:
        raise invalid("max_tokens", "is missing; set it to a positive integer")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(typed(fields, "tools", list, []))]
    choice, forced = _choice(fields, tools)
    return ChatRequest(
        messages=_messages(fields, images),
        model=typed(fields, "model", str, ""),
        tools=tools or None,
        calls_tools=bool(tools) and choice != "none",
        forced=forced,
        max_tokens=most_tokens(fields, "max_tokens"),
        stop=_stop(fields),
        stream=typed(fields, "stream", bool, False),
        object_arguments=True,
        overridden=overridden_by_run(fields, sampling, strict=strict) + _ignored(fields),
    )


def refusal(error: ApiError) -> Json:
    """Returns the body of an error response, whose fields `code` and `param` have the same values as in OpenAI's
    API."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error), "code": error.code, "param": error.param}}


class MessageWriter(AnswerWriter):
    """Writer of one message in the format of Anthropic's Messages API."""

    def complete(self, message: Message, completion: Completion) -> Json:
        """Returns the JSON body of the response to a non-streaming request."""
        return self._frame(_blocks(message), self._usage(completion)) | self._stop(message, completion)

    def begin(self) -> bytes:
        """Returns the event message_start. Its usage lacks the number of cached tokens, which is known only at the
        end."""
        usage = {"input_tokens": self.prompt, "output_tokens": 0}
        return _event("message_start", message=self._frame([], usage))

    def piece(self, shown: str, piece: Completion) -> bytes:
        """Returns the events that send a piece of text; the first piece also opens a text block."""
        if not shown:
            return b""
        out = b""
        if not self._open:
            out += _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        self._open = True
        return out + _event("content_block_delta", index=0, delta={"type": "text_delta", "text": shown})

    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """Returns the events that send any remaining text or blocks, then the stop reason and the usage."""
        out = b""
        if rest is not None:
            out += self.piece(rest, completion)
            if self._open:
                out += _event("content_block_stop", index=0)
        else:
            for index, block in enumerate(_blocks(message)):
                out += _block_events(index, block)
        delta = self._stop(message, completion)
        return out + _event("message_delta", delta=delta, usage=self._usage(completion)) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """Returns the event that reports an error after the response has started."""
        return _event("error", error=refusal(error)["error"])

    def _frame(self, content: list[Json], usage: dict[str, int]) -> Json:
        out = {"id": f"msg_{self.index}", "type": "message", "role": "assistant", "model": self.request.model}
        return out | {"content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _stop(self, message: Message, completion: Completion) -> Json:
        by = self.reading.stopped_by(completion.token_ids.tolist(), self.request.stop)
        if message.get("tool_calls"):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if by is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": by}
        reason = "max_tokens" if completion.finish_reason == "length" else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, completion: Completion) -> dict[str, int]:
        """Returns the token counts; cached prompt tokens are counted separately, as in Anthropic's API."""
        cached = min(completion.cached_tokens, self.prompt)
        return {
            "input_tokens": self.prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(completion.token_ids),
        }


def _blocks(message: Message) -> list[Json]:
    out: list[Json] = []
    if message.get("reasoning_content"):
        out.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message.get("content"):
        out.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        arguments = decoded(call["function"]["arguments"])
        out.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return out


def _block_events(index: int, block: Json) -> bytes:
    kind = block["type"]
    if kind == "tool_use":
        start = {**block, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
    else:  # a text or thinking block, whose content is the field of its type
        start = {**block, kind: ""}
        delta = {"type": f"{kind}_delta", kind: block[kind]}
    return (
        _event("content_block_start", index=index, content_block=start)
        + _event("content_block_delta", index=index, delta=delta)
        + _event("content_block_stop", index=index)
    )


def _event(kind: str, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encoded({"type": kind, **data}))


def _messages(fields: Json, images: Collection[str] | None) -> list[Message]:
    out: list[Message] = []
    if fields.get("system"):
        out.append({"role": "system", "content": text_of(fields["system"], "system")})
    messages = typed(fields, "messages", list, [])
    for index, message in enumerate(messages):
        out += _message(message, f"messages[{index}]", images)
    if not messages or out[-1]["role"] in ("system", "assistant"):
        raise invalid("messages", "is empty or ends with an assistant message; append a user message")
    return out


def _message(message: object, path: str, images: Collection[str] | None) -> list[Message]:
    """Converts an Anthropic message to chat-template messages, in which every tool result is a separate message.
    `path`: location of the message in the request, for error messages."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or role not in ("user", "assistant"):
        raise invalid(f"{path}.role", f"must be user or assistant, not {str(role)[:50]!r}")
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if role == "assistant":
        return [_assistant(blocks, path)]
    out: list[Message] = []
    for index, block in enumerate(blocks):
        block_path = f"{path}.content[{index}]" if isinstance(content, list) else f"{path}.content"
        if type_of(block) == "tool_result":
            result = content_of(block.get("content") or "", block_path, images)
            out.append(
                {"role": "tool", "content": result, "tool_call_id": required(block, "tool_use_id", str, block_path)}
            )
            continue
        shown = content_of([block], block_path, images)
        if not out or out[-1]["role"] != "user":
            out.append({"role": "user", "content": shown})
        elif isinstance(shown, str) and isinstance(out[-1]["content"], str):
            out[-1]["content"] += shown
        else:
            out[-1]["content"] = _as_parts(out[-1]["content"]) + _as_parts(shown)
    return out or [{"role": "user", "content": ""}]


def _as_parts(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _assistant(blocks: list[Any], path: str) -> Message:
    """Converts an assistant message to the chat template's format. Omits its thinking, which chat templates render
    differently or not at all."""
    text = ""
    calls = []
    for index, block in enumerate(blocks):
        block_path = f"{path}.content[{index}]"
        if type_of(block) == "tool_use":
            function = {
                "name": required(block, "name", str, block_path),
                "arguments": required(block, "input", dict, block_path),
            }
            calls.append({"id": required(block, "id", str, block_path), "type": "function", "function": function})
        elif type_of(block) not in ("thinking", "redacted_thinking"):
            text += text_of([block], block_path)
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(tool: object, path: str) -> Json:
    """Converts a tool to the chat template's format. `path`: location of the tool in the request, for error
    messages."""
    declaration = as_object(tool, path)
    kind = declaration.get("type", "custom")
    if kind not in (None, "custom"):
        raise unsupported(f"{path}.type", f"is {kind}; only tools that the agent itself executes are supported")
    function: Json = {"name": required(declaration, "name", str, path)}
    function["parameters"] = required(declaration, "input_schema", dict, path)
    description = typed(declaration, "description", str, "", path)
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def _only(fields: Json, name: str, allowed: tuple[str, ...]) -> str:
    value = fields.get(name, {"type": allowed[0]})
    if type_of(value) not in allowed:
        raise unsupported(name, f"{json.dumps(value)} is not supported; remove it")
    return type_of(value)


def _choice(fields: Json, tools: list[Json]) -> tuple[str, Forced | None]:
    """Returns the type of `tool_choice`, and the calls that it forces (None if it forces none)."""
    choice = _only(fields, "tool_choice", ("auto", "none", "any", "tool"))
    if choice in ("auto", "none"):
        return choice, None
    value = fields["tool_choice"]
    name = None
    if choice == "tool":
        name = required(value, "name", str, "tool_choice")
    return choice, forced_by(tools, name, once=typed(value, "disable_parallel_tool_use", bool, False, "tool_choice"))


def _ignored(fields: Json) -> tuple[str, ...]:
    """Returns the names of requested features that are ignored: a thinking budget and an effort, which agents request
    by default.

    Raises ApiError for unsupported features that an agent depends on.
    """
    thinking = _only(fields, "thinking", ("disabled", "enabled", "adaptive"))
    output = fields.get("output_config", {})
    context = fields.get("context_management", {})
    if not isinstance(output, dict) or output.keys() - {"effort"}:
        raise unsupported("output_config", f"{json.dumps(output)} is not supported; only effort may be set")
    edits = context.get("edits", []) if isinstance(context, dict) else None
    # Requests to clear past thinking have no effect, because the model never sees past thinking.
    if not isinstance(edits, list) or not all(type_of(edit).startswith("clear_thinking_") for edit in edits):
        raise unsupported("context_management", "may only clear past thinking; remove messages in the agent instead")
    ignored = []
    if thinking != "disabled":
        ignored.append("thinking")
    if output.get("effort") is not None:
        ignored.append("output_config.effort")
    return tuple(ignored)


def _stop(fields: Json) -> list[str]:
    stop = typed(fields, "stop_sequences", list, [])
    if not all(isinstance(text, str) and text for text in stop):
        raise invalid("stop_sequences", "must be a list of non-empty strings")
    if len(stop) > STOP_SEQUENCES:
        raise invalid("stop_sequences", f"has {len(stop)} strings; send at most {STOP_SEQUENCES}")
    check_stop(stop, "stop_sequences")
    return stop


MESSAGES = ChatApi(read_messages, MessageWriter, refusal)
"""Parser, writer and error format for Anthropic's endpoint /v1/messages."""
COUNT_TOKENS = ChatApi(partial(read_messages, counts=True), MessageWriter, refusal)
"""Parser, writer and error format for Anthropic's endpoint /v1/messages/count_tokens."""
