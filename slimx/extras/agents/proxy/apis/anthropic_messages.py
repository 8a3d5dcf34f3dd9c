"""Anthropic's messages as agents ask for them and get them: blocks of text and tools, whole or as events.

The names are those of Anthropic's API reference for /v1/messages.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from slimx.extras.agents.proxy.apis.wire import AnswerWriter, Wire
from slimx.extras.agents.proxy.errors import ApiError, invalid, unsupported
from slimx.extras.agents.proxy.request import (
    ChatRequest,
    Json,
    Message,
    as_object,
    check_stop,
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
"""Stop sequences of a request, at most."""
IGNORED = frozenset({"cache_control", "metadata", "service_tier"})
"""Parameters that change nothing: they are about Anthropic's service."""
CARRIED_OUT = frozenset(
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


def read_messages(body: Any, sampling: Json, *, strict: bool, counts: bool = False) -> ChatRequest:
    """The request in a JSON body, which with `counts` needs no max_tokens. Raises ApiError for what cannot be carried
    out."""
    given = fields_of(body, IGNORED | CARRIED_OUT, {})
    if not counts and "max_tokens" not in given:
        raise invalid("max_tokens", "is missing; give a positive number")
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(typed(given, "tools", list, []))]
    choice, forced = _choice(given, tools)
    return ChatRequest(
        messages=_messages(given),
        model=typed(given, "model", str, ""),
        tools=tools or None,
        calls_tools=bool(tools) and choice != "none",
        forced=forced,
        max_tokens=most_tokens(given, "max_tokens"),
        stop=_stop(given),
        stream=typed(given, "stream", bool, False),
        object_arguments=True,
        overridden=overridden_by_run(given, sampling, strict=strict) + _not_done(given),
    )


def refusal(error: ApiError) -> Json:
    """The body of an error; `code` and `param` are those that chat completions tell."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = {"type": kind, "message": str(error), "code": error.code, "param": error.param}
    return {"type": "error", "error": told}


class MessageWriter(AnswerWriter):
    """Writes one message of Anthropic's API."""

    def whole(self, message: Message, completion: Completion) -> Json:
        """The answer in one."""
        return self._frame(_blocks(message), self._usage(completion)) | self._stop(message, completion)

    def begin(self) -> bytes:
        """The event message_start; what the engine had cached is known at the end only."""
        usage = {"input_tokens": self.prompt, "output_tokens": 0}
        return _event("message_start", message=self._frame([], usage))

    def piece(self, shown: str, piece: Completion) -> bytes:
        """A piece of text, in a block that begins with the first."""
        if not shown:
            return b""
        out = b"" if self._open else _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        self._open = True
        return out + _event("content_block_delta", index=0, delta={"type": "text_delta", "text": shown})

    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """The blocks that are left, the stop reason and the usage."""
        out = b""
        if rest is not None:
            out += self.piece(rest, completion)
            out += _event("content_block_stop", index=0) if self._open else b""
        else:
            out += b"".join(_block_events(index, block) for index, block in enumerate(_blocks(message)))
        delta = self._stop(message, completion)
        return out + _event("message_delta", delta=delta, usage=self._usage(completion)) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """The event error."""
        return _event("error", error=refusal(error)["error"])

    def _frame(self, content: list[Json], usage: dict[str, int]) -> Json:
        out = {"id": f"msg_{self.number}", "type": "message", "role": "assistant", "model": self.request.model}
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
        """Numbers of tokens; those of the prompt that an engine had cached are counted apart, as the API does."""
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
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        out.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return out


def _block_events(index: int, block: Json) -> bytes:
    name, delta = {
        "thinking": ("thinking", "thinking_delta"),
        "text": ("text", "text_delta"),
        "tool_use": ("input", "input_json_delta"),
    }[block["type"]]
    if name == "input":
        start, change = {**block, "input": {}}, {"partial_json": json.dumps(block["input"], ensure_ascii=False)}
    else:
        start, change = {**block, name: ""}, {name: block[name]}
    return (
        _event("content_block_start", index=index, content_block=start)
        + _event("content_block_delta", index=index, delta={"type": delta, **change})
        + _event("content_block_stop", index=index)
    )


def _event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


def _messages(given: Json) -> list[Message]:
    out: list[Message] = []
    if given.get("system"):
        out.append({"role": "system", "content": text_of(given["system"], "system")})
    asked = typed(given, "messages", list, [])
    for number, message in enumerate(asked):
        out += _message(message, f"messages[{number}]")
    if not asked or out[-1]["role"] in ("system", "assistant"):
        raise invalid("messages", "must end with a message that the assistant answers")
    return out


def _message(message: Any, where: str) -> list[Message]:
    """The messages of chat templates for one of the API: results of tools are messages of their own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise invalid(f"{where}.role", "is none of user, assistant")
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if role == "assistant":
        return [_assistant(blocks, where)]
    out: list[Message] = []
    for number, block in enumerate(blocks):
        at = f"{where}.content[{number}]" if isinstance(content, list) else f"{where}.content"
        if type_of(block) == "tool_result":
            result = text_of(block.get("content") or "", at)
            out.append({"role": "tool", "content": result, "tool_call_id": required(block, "tool_use_id", str, at)})
        elif out and out[-1]["role"] == "user":
            out[-1]["content"] += text_of([block], at)
        else:
            out.append({"role": "user", "content": text_of([block], at)})
    return out or [{"role": "user", "content": ""}]


def _assistant(blocks: list[Any], where: str) -> Message:
    """An answer. Its thinking is left out: a template shows an answer's past reasoning its own way, or not at all."""
    text, calls = "", []
    for number, block in enumerate(blocks):
        at = f"{where}.content[{number}]"
        if type_of(block) == "tool_use":
            function = {"name": required(block, "name", str, at), "arguments": required(block, "input", dict, at)}
            calls.append({"id": required(block, "id", str, at), "type": "function", "function": function})
        elif type_of(block) not in ("thinking", "redacted_thinking"):
            text += text_of([block], at)
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def _tool(tool: Any, where: str) -> Json:
    """A tool as chat templates want it."""
    kind = as_object(tool, where).get("type", "custom")
    if kind not in (None, "custom"):
        raise unsupported(f"{where}.type", f"is {kind}; only tools that the agent itself carries out are supported")
    function: Json = {"name": required(tool, "name", str, where)}
    function["parameters"] = required(tool, "input_schema", dict, where)
    if description := typed(tool, "description", str, "", where):
        function["description"] = description
    return {"type": "function", "function": function}


def _only(given: Json, name: str, allowed: tuple[str, ...]) -> str:
    value = given.get(name, {"type": allowed[0]})
    if type_of(value) not in allowed:
        raise unsupported(name, f"{json.dumps(value)} is not supported; leave it out")
    return type_of(value)


def _choice(given: Json, tools: list[Json]) -> tuple[str, Forced | None]:
    """`tool_choice`, and the calls that it forces."""
    choice = _only(given, "tool_choice", ("auto", "none", "any", "tool"))
    if choice in ("auto", "none"):
        return choice, None
    value = given["tool_choice"]
    name = required(value, "name", str, "tool_choice") if choice == "tool" else None
    return choice, forced_by(tools, name, once=typed(value, "disable_parallel_tool_use", bool, False, "tool_choice"))


def _not_done(given: Json) -> tuple[str, ...]:
    """Names of default requests of agents that have no effect here: thinking to a budget, an effort. Raises ApiError
    for a request that an agent would miss."""
    thinking = _only(given, "thinking", ("disabled", "enabled", "adaptive"))
    output, context = given.get("output_config", {}), given.get("context_management", {})
    if not isinstance(output, dict) or output.keys() - {"effort"}:
        raise unsupported("output_config", f"{json.dumps(output)} is not supported; only an effort may be given")
    edits = context.get("edits", []) if isinstance(context, dict) else None
    # Past thinking is never shown to the model, so that there is none to clear.
    if not isinstance(edits, list) or not all(type_of(edit).startswith("clear_thinking_") for edit in edits):
        raise unsupported(
            "context_management", "may clear past thinking, and nothing else: the agent must drop messages itself"
        )
    asked = {"thinking": thinking != "disabled", "output_config.effort": output.get("effort") is not None}
    return tuple(name for name, is_asked in asked.items() if is_asked)


def _stop(given: Json) -> list[str]:
    stop = typed(given, "stop_sequences", list, [])
    if not all(isinstance(text, str) and text for text in stop):
        raise invalid("stop_sequences", "is a list of strings")
    if len(stop) > STOP_SEQUENCES:
        raise invalid("stop_sequences", f"has {len(stop)} strings; at most {STOP_SEQUENCES} are looked for")
    check_stop(stop, "stop_sequences")
    return stop


MESSAGES = Wire(read_messages, MessageWriter, refusal)
"""The API /v1/messages."""
COUNT_TOKENS = Wire(partial(read_messages, counts=True), MessageWriter, refusal)
"""The API /v1/messages/count_tokens."""
