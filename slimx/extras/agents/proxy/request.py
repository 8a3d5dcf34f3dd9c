"""Validated requests to the proxy: the part that all three APIs share."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, cast

from slimx.data.integers import as_whole
from slimx.extras.agents.proxy.bodies import decoded
from slimx.extras.agents.proxy.errors import ApiError, invalid, unsupported
from slimx.extras.agents.proxy.tool_choice import Forced, forced_by
from slimx.json_types import Json

Message = Json

RUN = ("temperature", "top_p")
"""Sampling parameters that only the run may set, because the trainer must know them and a trajectory has one
temperature."""
MODEL_CHARACTERS = 1000
"""Maximum length of a requested model name in characters; limited because every chunk of a response repeats the
name."""
KINDS: dict[type, str] = {bool: "boolean", float: "number", str: "string", list: "list", dict: "object"}
"""JSON names of Python types, for error messages."""
STOP_CHARACTERS = 1000
"""Maximum length of a stop string in characters; limited because every piece of a stream is searched for stop
strings."""
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """Validated request of any API, in one common form."""

    messages: list[Message]
    """Messages in the chat template's format: content is text, or a list of parts of type text and image if there is an
    image (`content_of`); a tool call's arguments are an object."""
    model: str
    """Model name in the agent's request; it has no effect except that the response repeats it."""
    tools: list[Json] | None = None
    calls_tools: bool = False
    """True if the response is parsed for tool calls."""
    forced: Forced | None = None
    """Tool calls that the response must consist of; None if the model decides whether to call tools."""
    max_tokens: int | None = None
    """Maximum number of sampled tokens; None for the run's maximum."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the response and are not part of it."""
    stream: bool = False
    usage: bool = False
    """True if a streamed response must end with the token counts."""
    logprobs: bool = False
    object_arguments: bool = False
    """True if the API only supports tool calls whose arguments are a JSON object. A response with other calls is then
    returned as text."""
    overridden: tuple[str, ...] = ()
    """Names of the parameters in `RUN` that the run overrides, and of requested features that are ignored."""

    def __post_init__(self) -> None:
        if len(self.model) > MODEL_CHARACTERS:
            raise invalid("model", f"has {len(self.model)} characters; send at most {MODEL_CHARACTERS}")


def fields_of(body: object, known: Collection[str], neutral: Json) -> Json:
    """Returns the fields of a request's JSON body that are not null.

    Raises ApiError for a field that is neither in `known` nor in `neutral`, or that differs from its only supported
    value in `neutral`.
    """
    if not isinstance(body, dict):
        raise ApiError(
            "the request body is not a JSON object; send the parameters as one JSON object", code="invalid_json"
        )
    fields = {name: value for name, value in body.items() if value is not None}
    for name in sorted(fields.keys() - known - neutral.keys()):
        raise ApiError(
            f"the parameter {name} is not supported by this server; remove {name} from the request",
            code="unsupported_parameter",
            param=name,
        )
    for name, only in neutral.items():
        if fields.get(name, only) != only:
            raise unsupported(name, f"{json.dumps(fields[name])} is not supported; remove it")
    return fields


def read_choice(fields: Json, tools: list[Any]) -> tuple[bool, Forced | None]:
    """Parses `tool_choice` of OpenAI's APIs. Returns whether the response is parsed for calls, and the forced calls
    (None if there are none)."""
    choice = fields.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return choice == "auto", None
    if choice == "required":
        return True, forced_by(tools, None, once=fields.get("parallel_tool_calls") is False)
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)  # the responses API has the name one level higher
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return True, forced_by(tools, function["name"], once=True)
    raise unsupported(
        "tool_choice", f"{json.dumps(choice)} is not supported; use auto, none, required or a function's name"
    )


def overridden_by_run(fields: Json, sampling: Json, *, strict: bool) -> tuple[str, ...]:
    """Returns the names of the parameters in `RUN` whose values in a request differ from the run's.

    `sampling`: the run's sampling parameters. `strict`: True to raise ApiError for the first such parameter.
    """
    overridden = []
    for name in RUN:
        current = sampling.get(name, 1.0)
        if typed(fields, name, float, current) != current:
            if strict:
                raise unsupported(name, f"{fields[name]} is not the run's {current}; remove it")
            overridden.append(name)
    return tuple(overridden)


def read_message(message: object, path: str = "the message", *, images: Collection[str] | None = None) -> Message:
    """Converts a Chat Completions message to the chat template's format. `path`: location of the message in the
    request, for error messages. `images`: as in `content_of`, for messages of users and
    tools."""
    role = message.get("role") if isinstance(message, dict) else None
    if role == "developer":
        role = "system"
    if not isinstance(message, dict) or role not in ROLES:
        raise invalid(f"{path}.role", f"must be one of {', '.join(ROLES)}, not {str(role)[:50]!r}")
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = content_of(content, f"{path}.content", images if role in ("user", "tool") else None)
    out: Message = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if name in message:
            value = typed(message, name, str, "", path)
            if value:
                out[name] = value
    calls = typed(message, "tool_calls", list, [], path) if "tool_calls" in message else None
    if calls:
        out["tool_calls"] = [_tool_call(call, f"{path}.tool_calls") for call in calls]
    return out


def text_of(content: object, path: str) -> str:
    """Returns the text of a message's content: a string, or parts of type text. Raises ApiError for other parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or type_of(part) != "text":
            problem = f"has content of type {type_of(part)}, but only text is supported here"
            if type_of(part) in IMAGES:
                problem += "; an image needs a run with trainer.vision, in a message of the user or of a tool"
            raise unsupported(path, problem)
        texts.append(required(part, "text", str, path))
    return "".join(texts)


IMAGES = ("image", "image_url", "input_image")
"""Types of image parts in the APIs."""


def content_of(content: object, path: str, images: Collection[str] | None) -> str | list[Json]:
    """Returns a message's content as text, or as parts if it contains images. `images`: references to images that
    `image_url` may contain; None to refuse all images. Raises ApiError for parts of other types."""
    if images is None or not isinstance(content, list) or not any(type_of(part) in IMAGES for part in content):
        return text_of(content, path)
    parts: list[Json] = []
    for part in content:
        if type_of(part) in IMAGES:
            parts.append({"type": "image", "image": _image(part, path, images)})
        else:
            parts.append({"type": "text", "text": text_of([part], path)})
    return parts


def _image(part: Json, path: str, known: Collection[str]) -> str:
    """Returns the data URI, or the one of `known`, in an image part of OpenAI's chat completions (image_url), OpenAI's
    responses (input_image) or Anthropic's messages (image)."""
    if part["type"] == "image":
        source = required(part, "source", dict, path)
        data = source.get("url")
        if source.get("type") == "base64":
            media = required(source, "media_type", str, f"{path}.source")
            data = f"data:{media};base64,{required(source, 'data', str, f'{path}.source')}"
    else:
        data = part.get("image_url")
        if isinstance(data, dict):
            data = data.get("url")
    if not isinstance(data, str) or not (data.startswith("data:") or data in known):
        problem = (
            f"refers to the image {str(data)[:100]!r}, which this server does not download; send the image itself "
        )
        raise unsupported(path, problem + "in base64, or an entry of the prompt's metadata.images")
    return data


def type_of(part: object) -> str:
    """Returns, for error messages, the field `type` of `part` if it is a JSON object, otherwise the name of its Python
    type."""
    return str(part.get("type")) if isinstance(part, dict) else type(part).__name__


def _tool_call(call: object, path: str) -> Json:
    fields = as_object(call, path)
    function = required(fields, "function", dict, path)
    name = function.get("name")
    if not isinstance(name, str):
        raise invalid(f"{path}.function.name", "is not a string")
    id = typed(fields, "id", str, "", path)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str) -> object:
    try:
        return decoded(text)
    except (ValueError, RecursionError):  # invalid JSON stays as the model wrote it
        return text


def most_tokens(fields: Json, name: str) -> int | None:
    """Returns the maximum number of sampled tokens in the field `name`; None if the field is missing.

    Raises ApiError unless the value is an integer above 0.
    """
    count = as_whole(fields.get(name))
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise invalid(name, f"is {count!r}; set it to a positive integer")
    return count


def check_stop(stop: list[str], param: str) -> None:
    """Raises ApiError for a stop string that is too long to search for in a stream."""
    longest = max(map(len, stop), default=0)
    if longest > STOP_CHARACTERS:
        raise invalid(param, f"has a string of {longest} characters; shorten it to at most {STOP_CHARACTERS}")


def parts(request: ChatRequest) -> int:
    """Returns the total number of messages, calls, images and tools. Each of them takes at least one token, so the
    total is a lower bound on the prompt's length in tokens."""
    total = len(request.messages) + len(request.tools or ())
    for message in request.messages:
        total += len(message.get("tool_calls", ()))
        if isinstance(message["content"], list):
            total += sum(part["type"] == "image" for part in message["content"])
    return total


def characters(request: ChatRequest) -> int:
    """Returns a lower bound on the number of characters that the request's messages and tools take up in a chat
    template."""
    total = 0
    for message in request.messages:
        content = message["content"]
        total += len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)
        for name in ("name", "tool_call_id"):
            total += len(message.get(name, ""))
        for call in message.get("tool_calls", ()):
            total += len(str(call))
    for tool in request.tools or ():
        total += len(str(tool))
    return total


def typed[T](fields: Json, name: str, kind: type[T], default: T, path: str = "") -> T:
    """Returns the field `name` of the object at `path`, or `default` if the field is missing or null.

    Raises ApiError for a value of a type other than `kind`.
    """
    return default if fields.get(name) is None else required(fields, name, kind, path)


def required[T](fields: Json, name: str, kind: type[T], path: str = "") -> T:
    """Returns the field `name` of the object at `path`.

    Raises ApiError if the field is missing, null, or of a type other than `kind`.
    """
    value = fields.get(name)
    if not (isinstance(value, kind) or (kind is float and type(value) is int)):
        raise invalid(f"{path}.{name}" if path else name, f"is not a {KINDS[kind]}")
    return cast(T, value)  # an int counts as a float


def as_object(value: object, path: str) -> Json:
    """Returns `value` if it is a JSON object. Raises ApiError, with the location `path`, for other values."""
    if not isinstance(value, dict):
        raise invalid(path, "is not an object")
    return value
