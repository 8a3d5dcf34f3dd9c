"""Answers of /v1/chat/completions, made from sampled tokens: text, tool calls, usage, log-probs, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slimx.rollout.client.completion import Completion
from slimx.rollout.proxy.request import ChatRequest, Message
from slimx.rollout.proxy.tool_calls import ToolCall, ToolParser

THOUGHT_ENDS = "</think>"


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Turns sampled tokens into a message."""

    tokenizer: Any
    parse_tools: ToolParser
    separates_reasoning: bool = False
    """True if what stands before </think> is `reasoning_content`."""

    def text(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Without special tokens, up to the first stop string."""
        return cut(self.tokenizer.decode(list(token_ids), skip_special_tokens=True), stop)

    def pieces(self, request: ChatRequest) -> Pieces | None:
        """For an answer that can be shown while it is sampled; None where it has to be read as a whole first."""
        return None if request.calls_tools or self.separates_reasoning else Pieces(self, request.stop)

    async def message(self, token_ids: Sequence[int], request: ChatRequest, number: int) -> Message:
        """The assistant's message, as the API tells it; `number` makes the ids of tool calls unique."""
        text, thought = self.text(token_ids, request.stop), ""
        if self.separates_reasoning:
            thought, text = split(text)
        message: Message = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        if request.calls_tools:
            content, calls = await self.parse_tools(self._raw(token_ids, request.stop), request.tools or [])
            if calls:
                message["content"] = content or None
                message["tool_calls"] = [_call(call, number, index) for index, call in enumerate(calls)]
        return message

    def _raw(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """The text with the special tokens in it by which some models mark their calls, but without the end token."""
        ids = list(token_ids)
        if ids and ids[-1] in self.tokenizer.all_special_ids:
            ids.pop()
        text = cut(self.tokenizer.decode(ids, skip_special_tokens=False), stop)
        return split(text)[1] if self.separates_reasoning else text


class Pieces:
    """The text of an answer whose tokens arrive one by one. What was shown never changes: characters whose bytes have
    not all come, and what may be the beginning of a stop string, are held back."""

    def __init__(self, reading: AnswerReader, stop: Sequence[str]) -> None:
        self._reading, self._stop = reading, stop
        self._ids: list[int] = []
        self._from = self._done = 0
        """Tokens are decoded from `_from` on, and those before `_done` are in `_text`: some context, because a token's
        text may depend on the one before it."""
        self._text = ""
        self.shown = ""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that can be shown now."""
        self._ids += [int(token) for token in token_ids]
        before, now = self._decode(self._from, self._done), self._decode(self._from, len(self._ids))
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._from, self._done = self._done, len(self._ids)
        whole = cut(self._text, self._stop)
        held = 0 if len(whole) < len(self._text) else max((_begun(whole, stop) for stop in self._stop), default=0)
        return self._show(whole[: len(whole) - held])

    def end(self) -> str:
        """The rest."""
        text = self._reading.text(self._ids, self._stop)
        if not text.startswith(self.shown):  # a tokenizer whose text depends on more than the token before
            before, now = self._decode(self._from, self._done), self._decode(self._from, len(self._ids))
            text = cut(self._text + now[len(before) :], self._stop)
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[len(self.shown) :]
        self.shown += new
        return new

    def _decode(self, start: int, stop: int) -> str:
        return self._reading.tokenizer.decode(self._ids[start:stop], skip_special_tokens=True)


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


def split(text: str) -> tuple[str, str]:
    """Splits a text into what was thought and the answer."""
    thought, ends, answer = text.rpartition(THOUGHT_ENDS)
    return (thought.replace("<think>", "", 1).strip(), answer.strip()) if ends else ("", text)


def cut(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first stop string."""
    ends = [at for each in stop if (at := text.find(each)) >= 0]
    return text[: min(ends)] if ends else text


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` may begin."""
    return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)


def _call(call: ToolCall, number: int, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{number}_{index}", "type": "function", "function": function}
