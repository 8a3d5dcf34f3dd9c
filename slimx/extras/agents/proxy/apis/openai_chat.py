"""OpenAI's chat completions as agents get them: whole, in chunks, with usage and log-probs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimx.extras.agents.proxy.answer import AnswerReader
from slimx.extras.agents.proxy.apis.wire import AnswerWriter
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.agents.proxy.request import ChatRequest, Message, read_request
from slimx.rollout.client.completion import Completion


class OpenaiChat:
    """The API /v1/chat/completions."""

    def read(self, body: Any, sampling: Mapping[str, Any], *, strict: bool) -> ChatRequest:
        """The request in a JSON body."""
        return read_request(body, sampling, strict=strict)

    def refusal(self, error: ApiError) -> dict[str, Any]:
        """The body of an error."""
        return error.body

    def writer(self, request: ChatRequest, number: int, prompt: int, reading: AnswerReader) -> AnswerWriter:
        """The writer of one answer."""
        return ChatWriter(request, Reply(f"chatcmpl-{number}", request.model, prompt), reading.tokenizer)


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Writes one chat completion."""

    request: ChatRequest
    reply: Reply
    tokenizer: Any

    def whole(self, message: Message, completion: Completion) -> dict[str, Any]:
        """The answer in one."""
        return self.reply.whole(message, completion, self.request, self.tokenizer)

    def begin(self) -> bytes:
        """The chunk that names the role."""
        return _event(self.reply.chunk({"role": "assistant", "content": ""}))

    def piece(self, shown: str, piece: Completion) -> bytes:
        """A chunk of text and log-probs."""
        told = logprobs(piece, self.tokenizer) if self.request.logprobs else None
        return _event(self.reply.chunk({"content": shown}, logprobs=told)) if shown or told else b""

    def end(self, message: Message, rest: str | None, completion: Completion) -> bytes:
        """The rest of the message, the finish reason, and the usage if it was asked for."""
        delta: dict[str, Any] = {"content": rest}
        if rest is None:
            delta = {name: value for name, value in message.items() if name != "role"}
            calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", []))]
            delta |= {"tool_calls": calls} if calls else {}
        out = _event(self.reply.chunk(delta)) if any(delta.values()) else b""
        out += _event(self.reply.chunk({}, finish_reason(message, completion)))
        return out + (_event(self.reply.last(completion)) if self.request.usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error as the last event."""
        return _event(error.body) + DONE


DONE = b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@dataclass(slots=True)
class Reply:
    """The frame of one answer: what all of its chunks have in common."""

    id: str
    model: str
    prompt: int
    """Tokens of the prompt."""
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, message: Message, completion: Completion, request: ChatRequest, tokenizer: Any) -> dict[str, Any]:
        """The answer in one."""
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(message, completion)}
        choice["logprobs"] = {"content": logprobs(completion, tokenizer)} if request.logprobs else None
        return self._frame("chat.completion", [choice]) | {"usage": self.usage(completion)}

    def chunk(
        self, delta: dict[str, Any], finish: str | None = None, logprobs: list[Any] | None = None
    ) -> dict[str, Any]:
        """A part of a streamed answer."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        choice["logprobs"] = {"content": logprobs} if logprobs is not None else None
        return self._frame("chat.completion.chunk", [choice])

    def last(self, completion: Completion) -> dict[str, Any]:
        """The chunk after all others, which tells the usage."""
        return self._frame("chat.completion.chunk", []) | {"usage": self.usage(completion)}

    def usage(self, completion: Completion) -> dict[str, Any]:
        """Numbers of tokens."""
        sampled = len(completion.token_ids)
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": sampled,
            "total_tokens": self.prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        }

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def finish_reason(message: Message, completion: Completion) -> str:
    """The finish reason in the API's words: stop, length or tool_calls."""
    return "tool_calls" if message.get("tool_calls") else completion.finish_reason


def logprobs(completion: Completion, tokenizer: Any) -> list[dict[str, Any]]:
    """Log-probs of each sampled token in the API's form; alternatives are not told."""
    out = []
    for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True):
        text = tokenizer.decode([token])
        out.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return out
