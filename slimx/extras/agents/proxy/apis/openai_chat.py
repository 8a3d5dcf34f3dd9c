"""OpenAI's chat completions API: requests, and responses as a whole or in chunks, with usage and log-probs.

Names are those of OpenAI's API reference for chat completions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from slimx.extras.agents.proxy.apis.base import AnswerWriter, ChatApi
from slimx.extras.agents.proxy.bodies import encoded
from slimx.extras.agents.proxy.errors import ApiError, invalid
from slimx.extras.agents.proxy.request import (
    ChatRequest,
    Json,
    Message,
    check_stop,
    fields_of,
    most_tokens,
    overridden_by_run,
    read_choice,
    read_message,
    typed,
)
from slimx.rollout.client.completion import Completion

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
"""Parameters that are accepted without effect, because they concern only OpenAI's hosted service or, like the seed, are
set by the run."""
NEUTRAL = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "n": 1,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "top_logprobs": 0,
}
"""Unsupported parameters and their neutral values: a request may set each parameter only to null or to its neutral
value."""
SUPPORTED = frozenset(
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
        "temperature",
        "tool_choice",
        "tools",
        "top_p",
    }
)


def read_chat(body: Any, sampling: Json, *, strict: bool, images: Collection[str] | None = None) -> ChatRequest:
    """Parses the JSON body of a request.

    `sampling`: the run's sampling parameters. `strict`: True to refuse values that differ from the run's instead of
    overriding them. `images`: as in `content_of`. Raises ApiError for an invalid or unsupported request.
    """
    fields = fields_of(body, IGNORED | SUPPORTED, NEUTRAL)
    overridden = overridden_by_run(fields, sampling, strict=strict)
    tools = typed(fields, "tools", list, []) or None
    stream_options = typed(fields, "stream_options", dict, {})
    calls_tools, forced = read_choice(fields, tools or [])
    most = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    return ChatRequest(
        messages=_messages(fields, images),
        model=typed(fields, "model", str, ""),
        tools=tools,
        calls_tools=tools is not None and calls_tools,
        forced=forced,
        max_tokens=most_tokens(fields, most),
        stop=_stop(fields),
        stream=typed(fields, "stream", bool, False),
        usage=typed(stream_options, "include_usage", bool, False),
        logprobs=typed(fields, "logprobs", bool, False),
        overridden=overridden,
    )


class ChatWriter(AnswerWriter):
    """Writer of one chat completion, as a whole or as a stream of chunks."""

    def complete(self, message: Message, completion: Completion) -> Json:
        """Returns the JSON body of the response to a non-streaming request."""
        choice = {"message": message, "finish_reason": _finish_reason(message, completion)}
        frame = self._frame("chat.completion", choice, self._logprobs(completion))
        return frame | {"usage": self._usage(completion)}

    def begin(self) -> bytes:
        """Returns the first chunk, which contains the role `assistant`."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, shown: str, piece: Completion) -> bytes:
        """Returns a chunk with text and log-probs, or b"" if there is neither."""
        logprobs = self._logprobs(piece)
        if not shown and not logprobs:
            return b""
        return self._chunk({"content": shown}, logprobs=logprobs)

    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """Returns the chunks that send the rest of the message, the finish reason, and the usage if it was
        requested."""
        delta: Json = {"content": rest}
        if rest is None:
            delta = {name: value for name, value in message.items() if name != "role"}
            if message.get("tool_calls"):
                delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
        out = b""
        if any(delta.values()):
            out += self._chunk(delta)
        out += self._chunk({}, _finish_reason(message, completion))
        if self.request.usage:
            out += _event(self._frame("chat.completion.chunk") | {"usage": self._usage(completion)})
        return out + DONE

    def failed(self, error: ApiError) -> bytes:
        """Returns the error as the stream's last event."""
        return _event(error.body) + DONE

    def _chunk(self, delta: Json, finish: str | None = None, logprobs: list[Any] | None = None) -> bytes:
        """Returns one chunk of a streamed response."""
        return _event(self._frame("chat.completion.chunk", {"delta": delta, "finish_reason": finish}, logprobs))

    def _frame(self, kind: str, choice: Json | None = None, logprobs: list[Any] | None = None) -> Json:
        """Returns the fields that a whole response and a chunk have in common. `choice`: only element of the field
        `choices`; None to leave that field empty."""
        choices = []
        if choice is not None:
            content = None if logprobs is None else {"content": logprobs}
            choices.append({"index": 0, **choice, "logprobs": content})
        return {
            "id": f"chatcmpl-{self.index}",
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }

    def _usage(self, completion: Completion) -> Json:
        """Returns the numbers of prompt, sampled and cached tokens in the API's format."""
        sampled = len(completion.token_ids)
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": sampled,
            "total_tokens": self.prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        }

    def _logprobs(self, completion: Completion) -> list[Json] | None:
        """Returns the log-prob of each sampled token in the API's format, without alternatives; None if the request
        does not ask for log-probs."""
        if not self.request.logprobs:
            return None
        out = []
        for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True):
            text = self.reading.tokenizer.decode([token])
            out.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return out


DONE = b"data: [DONE]\n\n"


def _event(data: Json) -> bytes:
    return b"data: " + encoded(data) + b"\n\n"


def _finish_reason(message: Message, completion: Completion) -> str:
    """Returns the API's finish reason: stop, length or tool_calls."""
    return "tool_calls" if message.get("tool_calls") else completion.finish_reason


def _messages(fields: Json, images: Collection[str] | None) -> list[Message]:
    messages = [
        read_message(message, f"messages[{index}]", images=images)
        for index, message in enumerate(typed(fields, "messages", list, []))
    ]
    if not messages or messages[-1]["role"] == "assistant":
        raise invalid("messages", "is empty or ends with an assistant message; append a user message")
    return messages


def _stop(fields: Json) -> list[str]:
    stop = fields.get("stop", [])
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(text, str) and text for text in stop):
        raise invalid("stop", "must be a non-empty string or a list of up to four non-empty strings")
    check_stop(stop, "stop")
    return stop


CHAT = ChatApi(read_chat, ChatWriter)
"""Parser, writer and error format for OpenAI's endpoint /v1/chat/completions."""
