"""Requests to /v1/chat/completions as the proxy takes them: what is carried out, what is ignored, what is refused.

The names are those of OpenAI's API reference for chat completions.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimx.data.whole import as_whole
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.agents.proxy.tool_choice import Forced, forced_by

Message = dict[str, Any]

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "seed",
        "service_tier",
        "store",
        "user",
    }
)
"""Parameters that change nothing: they are about OpenAI's service, or (seed) the run has its own."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
}
"""Parameters of which only these values (and null) can be carried out."""
RUN = ("temperature", "top_p")
"""Parameters that the run decides: the trainer has to know them, and one trajectory has one temperature."""
CARRIED_OUT = frozenset(
    {
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "parallel_tool_calls",
        "stop",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
    }
)
MODEL_CHARACTERS = 1000
"""Characters of a model's name, at most: each chunk of an answer repeats it."""
KINDS = {bool: "boolean", float: "number", str: "string", list: "list", dict: "object"}
"""JSON's names of the types of fields."""
STOP_CHARACTERS = 1000
"""Characters of a stop string, at most: each is looked for in every piece of a stream."""
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request, checked."""

    messages: list[Message]
    """As chat templates want them: content is text, a tool call's arguments are an object."""
    model: str
    """As the agent calls it; it goes back in the answer and means nothing else."""
    tools: list[dict[str, Any]] | None = None
    calls_tools: bool = False
    """True if tool calls are looked for in the answer."""
    forced: Forced | None = None
    """The calls that the answer must consist of; None: the model decides."""
    max_tokens: int | None = None
    """Tokens of the answer, at most; None: what the run allows."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the answer, and are left out of it."""
    stream: bool = False
    usage: bool = False
    """True if a stream ends with the number of tokens."""
    logprobs: bool = False
    object_arguments: bool = False
    """True if the API can tell only calls whose arguments are a JSON object: an answer with others is text alone."""
    overridden: tuple[str, ...] = ()
    """Parameters of `RUN` that the agent asked for otherwise than the run samples, and what it asked of the service
    that nobody does here."""

    def __post_init__(self) -> None:
        if len(self.model) > MODEL_CHARACTERS:
            text = f"model has {len(self.model)} characters; at most {MODEL_CHARACTERS} are repeated"
            raise ApiError(text, code="invalid_value", param="model")


def read_request(body: Any, sampling: Mapping[str, Any], *, strict: bool = False) -> ChatRequest:
    """The request in a JSON body. Raises ApiError for what cannot be carried out.

    `sampling`: the run's parameters. An agent that asks for others gets the run's, or with `strict` is refused.
    """
    if not isinstance(body, dict):
        raise ApiError("the body is no JSON object", code="invalid_json")
    given = {name: value for name, value in body.items() if value is not None}
    for name in sorted(given.keys() - IGNORED - NEUTRAL.keys() - CARRIED_OUT - set(RUN)):
        raise ApiError(f"{name} is not supported by this server", code="unsupported_parameter", param=name)
    for name, allowed in NEUTRAL.items():
        if given.get(name, allowed[0]) not in allowed:
            text = f"{name} {json.dumps(given[name])} is not supported; leave it out"
            raise ApiError(text, code="unsupported_value", param=name)
    overridden = overridden_by_run(given, sampling, strict=strict)
    tools = typed(given, "tools", list, []) or None
    stream_options = typed(given, "stream_options", dict, {})
    calls_tools, forced = read_choice(given, tools or [])
    return ChatRequest(
        messages=_messages(given),
        model=typed(given, "model", str, ""),
        tools=tools,
        calls_tools=tools is not None and calls_tools,
        forced=forced,
        max_tokens=_max_tokens(given),
        stop=_stop(given),
        stream=typed(given, "stream", bool, False),
        usage=typed(stream_options, "include_usage", bool, False),
        logprobs=typed(given, "logprobs", bool, False),
        overridden=overridden,
    )


def read_choice(given: Mapping[str, Any], tools: list[Any]) -> tuple[bool, Forced | None]:
    """`tool_choice` in the words of OpenAI's APIs: whether calls are looked for, and which are forced."""
    choice = given.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return choice == "auto", None
    if choice == "required":
        return True, forced_by(tools, None, once=given.get("parallel_tool_calls") is False)
    if isinstance(choice, dict) and choice.get("type") == "function":
        held = choice.get("function", choice)  # chat completions write the name one level deeper than responses
        if isinstance(held, dict) and isinstance(held.get("name"), str):
            return True, forced_by(tools, held["name"], once=True)
    text = f"tool_choice {json.dumps(choice)} is not supported; choose auto, none, required or a function's name"
    raise ApiError(text, code="unsupported_value", param="tool_choice")


def overridden_by_run(given: Mapping[str, Any], sampling: Mapping[str, Any], *, strict: bool) -> tuple[str, ...]:
    """Parameters of `RUN` that a request gives otherwise than the run samples; with `strict` ApiError for the first."""
    asked = {name: typed(given, name, float, sampling.get(name, 1.0)) for name in RUN}
    overridden = tuple(name for name in RUN if asked[name] != sampling.get(name, 1.0))
    if strict and overridden:
        name = overridden[0]
        text = f"{name} {given[name]} is not the run's {sampling.get(name, 1.0)}; leave it out"
        raise ApiError(text, code="unsupported_value", param=name)
    return overridden


def _messages(given: dict[str, Any]) -> list[Message]:
    messages = [
        read_message(message, f"messages[{number}]")
        for number, message in enumerate(typed(given, "messages", list, []))
    ]
    if not messages or messages[-1]["role"] == "assistant":
        text = "messages must end with a message that the assistant answers"
        raise ApiError(text, code="invalid_value", param="messages")
    return messages


def read_message(message: Any, where: str = "the message") -> Message:
    """A message of the API as chat templates want it; `where` it stands, for errors."""
    role = message.get("role") if isinstance(message, dict) else None
    role = "system" if role == "developer" else role
    if role not in ROLES:
        text = f"{where} has no role of {', '.join(ROLES)}"
        raise ApiError(text, code="invalid_value", param=f"{where}.role")
    out: Message = {"role": role, "content": _text(message.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if value := typed(message, name, str, "", where):
            out[name] = value
    if calls := typed(message, "tool_calls", list, [], where):
        out["tool_calls"] = [_tool_call(call, where) for call in calls]
    return out


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if wrong := [part for part in parts if not isinstance(part, dict) or part.get("type") != "text"]:
        kind = wrong[0].get("type") if isinstance(wrong[0], dict) else type(wrong[0]).__name__
        text = f"{where} has content of type {kind}; only text is supported"
        raise ApiError(text, code="unsupported_value", param=f"{where}.content")
    return "".join(typed(part, "text", str, "", f"{where}.content") for part in parts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        text = f"{where} has a tool call without function.name"
        raise ApiError(text, code="invalid_value", param=f"{where}.tool_calls")
    id, arguments = call.get("id") or "", function.get("arguments") or "{}"
    if not isinstance(id, str):
        text = f"{where} has a tool call whose id is no string"
        raise ApiError(text, code="invalid_value", param=f"{where}.tool_calls")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON is shown to the model as it wrote it
            arguments = json.loads(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _max_tokens(given: dict[str, Any]) -> int | None:
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    count = as_whole(given.get(name))
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ApiError(f"{name} is {count!r}; give a positive number", code="invalid_value", param=name)
    return count


def _stop(given: dict[str, Any]) -> list[str]:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(text, str) and text for text in stop):
        raise ApiError("stop is a string or a list of up to four", code="invalid_value", param="stop")
    check_stop(stop, "stop")
    return stop


def check_stop(stop: list[str], param: str) -> None:
    """Raise ApiError for a stop string that is too long to be looked for while an answer is streamed."""
    if (longest := max(map(len, stop), default=0)) > STOP_CHARACTERS:
        text = f"{param} has a string of {longest} characters; at most {STOP_CHARACTERS} are looked for"
        raise ApiError(text, code="invalid_value", param=param)


def parts(request: ChatRequest) -> int:
    """Messages, calls and tools of a request, of which each takes a token at least."""
    calls = sum(len(message.get("tool_calls", ())) for message in request.messages)
    return len(request.messages) + calls + len(request.tools or ())


def characters(request: ChatRequest) -> int:
    """Characters that the request's messages and tools have at least once a chat template has written them."""
    return sum(
        sum(len(message.get(name, "")) for name in ("content", "name", "tool_call_id"))
        + sum(len(str(call)) for call in message.get("tool_calls", ()))
        for message in request.messages
    ) + sum(len(str(tool)) for tool in request.tools or ())


def typed[T](given: Mapping[str, Any], name: str, kind: type[T], default: T, where: str = "") -> T:
    """Returns field `name` of the object at `where`, or `default` where it is missing or null. Raises ApiError for a
    value that is no `kind`."""
    value = given.get(name)
    if value is None:
        return default
    if not (isinstance(value, kind) or (kind is float and type(value) is int)):
        field = f"{where}.{name}" if where else name
        raise ApiError(f"{field} is no {KINDS[kind]}", code="invalid_value", param=field)
    return value
