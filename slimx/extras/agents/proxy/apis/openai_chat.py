"""OpenAI's chat completions as agents ask for them and get them: whole, in chunks, with usage and log-probs.

The names are those of OpenAI's API reference for chat completions.
"""

from __future__ import annotations

import json
from typing import Any

from slimx.extras.agents.proxy.apis.wire import AnswerWriter, Wire
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
"""Parameters that change nothing: they are about OpenAI's service, or (seed) the run has its own."""
NEUTRAL = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "n": 1,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "top_logprobs": 0,
}
"""Parameters of which only this value (and null) can be carried out."""
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
        "temperature",
        "tool_choice",
        "tools",
        "top_p",
    }
)


def read_chat(body: Any, sampling: Json, *, strict: bool) -> ChatRequest:
    """The request in a JSON body. Raises ApiError for what cannot be carried out."""
    given = fields_of(body, IGNORED | CARRIED_OUT, NEUTRAL)
    overridden = overridden_by_run(given, sampling, strict=strict)
    tools = typed(given, "tools", list, []) or None
    stream_options = typed(given, "stream_options", dict, {})
    calls_tools, forced = read_choice(given, tools or [])
    most = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    return ChatRequest(
        messages=_messages(given),
        model=typed(given, "model", str, ""),
        tools=tools,
        calls_tools=tools is not None and calls_tools,
        forced=forced,
        max_tokens=most_tokens(given, most),
        stop=_stop(given),
        stream=typed(given, "stream", bool, False),
        usage=typed(stream_options, "include_usage", bool, False),
        logprobs=typed(given, "logprobs", bool, False),
        overridden=overridden,
    )


class ChatWriter(AnswerWriter):
    """Writes one chat completion."""

    def whole(self, message: Message, completion: Completion) -> Json:
        """The answer in one."""
        choice = {"message": message, "finish_reason": _finish_reason(message, completion)}
        frame = self._frame("chat.completion", choice, self._logprobs(completion))
        return frame | {"usage": self._usage(completion)}

    def begin(self) -> bytes:
        """The chunk that names the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, shown: str, piece: Completion) -> bytes:
        """A chunk of text and log-probs."""
        logprobs = self._logprobs(piece)
        return self._chunk({"content": shown}, logprobs=logprobs) if shown or logprobs else b""

    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """The rest of the message, the finish reason, and the usage if it was asked for."""
        delta: Json = {"content": rest}
        if rest is None:
            delta = {name: value for name, value in message.items() if name != "role"}
            calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", []))]
            delta |= {"tool_calls": calls} if calls else {}
        out = self._chunk(delta) if any(delta.values()) else b""
        out += self._chunk({}, _finish_reason(message, completion))
        if self.request.usage:
            out += _event(self._frame("chat.completion.chunk") | {"usage": self._usage(completion)})
        return out + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error as the last event."""
        return _event(error.body) + DONE

    def _chunk(self, delta: Json, finish: str | None = None, logprobs: list[Any] | None = None) -> bytes:
        """A part of a streamed answer."""
        return _event(self._frame("chat.completion.chunk", {"delta": delta, "finish_reason": finish}, logprobs))

    def _frame(self, kind: str, choice: Json | None = None, logprobs: list[Any] | None = None) -> Json:
        """The frame that all parts of an answer have, around its choice."""
        told = {"content": logprobs} if logprobs is not None else None
        choices = [] if choice is None else [{"index": 0, **choice, "logprobs": told}]
        return {
            "id": f"chatcmpl-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }

    def _usage(self, completion: Completion) -> Json:
        """Numbers of tokens."""
        sampled = len(completion.token_ids)
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": sampled,
            "total_tokens": self.prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        }

    def _logprobs(self, completion: Completion) -> list[Json] | None:
        """Log-probs of each sampled token in the API's form, if they were asked for; alternatives are left out."""
        if not self.request.logprobs:
            return None
        out = []
        for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True):
            text = self.reading.tokenizer.decode([token])
            out.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return out


DONE = b"data: [DONE]\n\n"


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _finish_reason(message: Message, completion: Completion) -> str:
    """The finish reason in the API's words: stop, length or tool_calls."""
    return "tool_calls" if message.get("tool_calls") else completion.finish_reason


def _messages(given: Json) -> list[Message]:
    messages = [
        read_message(message, f"messages[{number}]")
        for number, message in enumerate(typed(given, "messages", list, []))
    ]
    if not messages or messages[-1]["role"] == "assistant":
        raise invalid("messages", "must end with a message that the assistant answers")
    return messages


def _stop(given: Json) -> list[str]:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(text, str) and text for text in stop):
        raise invalid("stop", "is a string or a list of up to four")
    check_stop(stop, "stop")
    return stop


CHAT = Wire(read_chat, ChatWriter)
"""The API /v1/chat/completions."""
