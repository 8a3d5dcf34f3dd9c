"""Requests to the proxy, checked: what the three APIs have in common."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from slimx.data.whole import Json, as_whole
from slimx.extras.agents.proxy.errors import ApiError, invalid, unsupported
from slimx.extras.agents.proxy.tool_choice import Forced, forced_by

Message = Json

RUN = ("temperature", "top_p")
"""Parameters that the run decides: the trainer has to know them, and one trajectory has one temperature."""
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
    tools: list[Json] | None = None
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
        if (length := len(self.model)) > MODEL_CHARACTERS:
            raise invalid("model", f"has {length} characters; at most {MODEL_CHARACTERS} are repeated")


def fields_of(body: Any, known: Collection[str], neutral: Json) -> Json:
    """The fields of a request's body that are not null. Raises ApiError for one that is neither `known` nor has its
    only value of `neutral`."""
    if not isinstance(body, dict):
        raise ApiError("the body is no JSON object", code="invalid_json")
    given = {name: value for name, value in body.items() if value is not None}
    for name in sorted(given.keys() - known - neutral.keys()):
        raise ApiError(f"{name} is not supported by this server", code="unsupported_parameter", param=name)
    for name, only in neutral.items():
        if given.get(name, only) != only:
            raise unsupported(name, f"{json.dumps(given[name])} is not supported; leave it out")
    return given


def read_choice(given: Json, tools: list[Any]) -> tuple[bool, Forced | None]:
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
    raise unsupported(
        "tool_choice", f"{json.dumps(choice)} is not supported; choose auto, none, required or a function's name"
    )


def overridden_by_run(given: Json, sampling: Json, *, strict: bool) -> tuple[str, ...]:
    """Parameters of `RUN` that a request gives otherwise than the run samples; with `strict` ApiError for the first."""
    asked = {name: typed(given, name, float, sampling.get(name, 1.0)) for name in RUN}
    overridden = tuple(name for name in RUN if asked[name] != sampling.get(name, 1.0))
    if strict and overridden:
        name = overridden[0]
        raise unsupported(name, f"{given[name]} is not the run's {sampling.get(name, 1.0)}; leave it out")
    return overridden


def read_message(message: Any, where: str = "the message") -> Message:
    """A message of the API as chat templates want it; `where` it stands, for errors."""
    role = message.get("role") if isinstance(message, dict) else None
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise invalid(f"{where}.role", f"is none of {', '.join(ROLES)}")
    content = message.get("content")
    out: Message = {"role": role, "content": "" if content is None else text_of(content, f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if value := typed(message, name, str, "", where):
            out[name] = value
    if calls := typed(message, "tool_calls", list, [], where):
        out["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in calls]
    return out


def text_of(content: Any, where: str) -> str:
    """The text of a message's content at `where`: a string, or parts of type text. Raises ApiError for another part."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if type_of(part) != "text":
            raise unsupported(where, f"has content of type {type_of(part)}; only text is supported")
    return "".join(required(part, "text", str, where) for part in parts)


def type_of(part: Any) -> str:
    """The type that an object of an API says it has; of anything else Python's name."""
    return str(part.get("type")) if isinstance(part, dict) else type(part).__name__


def _tool_call(call: Any, where: str) -> Json:
    function = required(as_object(call, where), "function", dict, where)
    name, id = required(function, "name", str, f"{where}.function"), typed(call, "id", str, "", where)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON is shown to the model as it wrote it
            arguments = json.loads(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def most_tokens(given: Json, name: str) -> int | None:
    """Tokens of the answer at most, by the field of this name; None without it. Raises ApiError for no whole number
    above 0."""
    count = as_whole(given.get(name))
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise invalid(name, f"is {count!r}; give a positive number")
    return count


def check_stop(stop: list[str], param: str) -> None:
    """Raise ApiError for a stop string that is too long to be looked for while an answer is streamed."""
    if (longest := max(map(len, stop), default=0)) > STOP_CHARACTERS:
        raise invalid(param, f"has a string of {longest} characters; at most {STOP_CHARACTERS} are looked for")


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


def typed[T](given: Json, name: str, kind: type[T], default: T, where: str = "") -> T:
    """Returns field `name` of the object at `where`, or `default` where it is missing or null. Raises ApiError for a
    value that is no `kind`."""
    return default if given.get(name) is None else required(given, name, kind, where)


def required[T](given: Json, name: str, kind: type[T], where: str = "") -> T:
    """Returns field `name` of the object at `where`. Raises ApiError for a value that is no `kind`, null among them."""
    value = given.get(name)
    if not (isinstance(value, kind) or (kind is float and type(value) is int)):
        raise invalid(f"{where}.{name}" if where else name, f"is no {KINDS[kind]}")
    return value


def as_object(value: Any, where: str) -> Json:
    """The object at `where`. Raises ApiError for anything else."""
    if not isinstance(value, dict):
        raise invalid(where, "is no object")
    return value
