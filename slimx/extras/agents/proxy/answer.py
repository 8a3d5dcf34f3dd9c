"""Converts sampled tokens to messages: text, reasoning and tool calls, as a whole or incrementally."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimx.data.chat.responses import THOUGHT_BEGINS, THOUGHT_ENDS
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.agents.proxy.request import ChatRequest, Json, Message
from slimx.extras.agents.proxy.tool_calls import ATTEMPT, ToolCall, ToolParser
from slimx.extras.agents.proxy.tool_choice import GRAMMARS, grammar

OPEN_TAIL = 16
"""Number of tokens at the end of a prompt in which a chat template may open the thinking."""
WAITING = 8
"""Maximum number of tokens that wait for the rest of a character, which has up to 4 bytes."""


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Converts sampled tokens to a message."""

    tokenizer: Any
    parse_tools: ToolParser
    separates_reasoning: bool = False
    """True if the text before </think> becomes `reasoning_content`."""
    parser: str = "hermes"
    """Name of `parse_tools`."""

    def text(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Decodes tokens without special ones, up to the first stop string."""
        return cut(self.tokenizer.decode(list(token_ids), skip_special_tokens=True), stop)

    def stopped_by(self, token_ids: Sequence[int], stop: Sequence[str]) -> str | None:
        """Returns the stop string that ended the response; None if none did."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return min((string for string in stop if string in text), key=text.find, default=None)

    def opened(self, after: Sequence[int]) -> bool:
        """Returns True if the chat template opened the thinking at the end of the prompt `after`."""
        tail = self.tokenizer.decode(list(after[-OPEN_TAIL:]), skip_special_tokens=False)
        return tail.rstrip().endswith(THOUGHT_BEGINS)

    async def calls(
        self, token_ids: Sequence[int], tools: list[Json], *, after: Sequence[int], stop: Sequence[str] = ()
    ) -> Calls:
        """Parses the calls after a response's thinking; calls within the thinking do not count. `after`: the tokens
        before the response."""
        thought, answer = spoken(self.raw(token_ids, stop), opened=self.opened(after))
        content, calls = await self.parse_tools(answer, tools)
        return Calls(thought, content, calls, ATTEMPT.search(answer) is not None)

    def grammar(self, request: ChatRequest) -> str | None:
        """Returns the grammar that enforces the forced calls of `request`; None if there are none.

        Raises ApiError if the tool parser has no grammar."""
        if request.forced is None:
            return None
        if self.parser not in GRAMMARS:
            text = f"tools cannot be forced with rollout.options.tool_parser {self.parser}, but with {GRAMMARS}"
            raise ApiError(text, code="unsupported_value", param="tool_choice")
        return grammar(request.forced, request.tools or [], thinks=self.separates_reasoning)

    def pieces(self, request: ChatRequest) -> Pieces | None:
        """Returns the incremental text of a response; None if it must be parsed as a whole first."""
        if request.calls_tools or self.separates_reasoning:
            return None
        return Pieces(self, request.stop)

    async def message(
        self, token_ids: Sequence[int], request: ChatRequest, index: int, *, after: Sequence[int]
    ) -> tuple[Message, bool]:
        """Returns the assistant's message in the API's form, and whether a tool call begins in it. `index`: index of
        the request, which makes the ids of calls unique. `after`: the tokens before the response."""
        text = self.text(token_ids, request.stop)
        thought = ""
        if self.separates_reasoning:
            thought, text = split(text)
        message: Message = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        if not request.calls_tools:
            return message, False
        found = await self.calls(token_ids, request.tools or [], after=after, stop=request.stop)
        if found.calls and (not request.object_arguments or all(map(_is_object, found.calls))):
            message["content"] = (found.content if self.separates_reasoning else found.text) or None
            message["tool_calls"] = written(found.calls, index)
        return message, found.attempted

    def raw(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Decodes tokens with special ones, which mark the calls of some models, but without the end token."""
        ids = list(token_ids)
        if ids and ids[-1] in self.tokenizer.all_special_ids:
            ids.pop()
        return cut(self.tokenizer.decode(ids, skip_special_tokens=False), stop)


@dataclass(frozen=True, slots=True)
class Calls:
    """Tool calls of a response, and the text around them."""

    thought: str
    """The text up to the end of the thinking; "" if there is none."""
    content: str
    """The rest of the text without its calls."""
    calls: list[ToolCall]
    attempted: bool
    """True if a call begins, readable or not."""

    @property
    def text(self) -> str:
        """The text without its calls, thinking included."""
        return (self.thought + self.content).strip()


class Pieces:
    """The text of a response whose tokens arrive one by one. Sent text never changes: incomplete characters, and a
    possible beginning of a stop string, are held back."""

    def __init__(self, reading: AnswerReader, stop: Sequence[str]) -> None:
        self._reading = reading
        self._stop = stop
        self._ids: list[int] = []
        self._from = 0
        """Index of the first token to decode: a token's text may depend on the one before it."""
        self._done = 0
        """Number of tokens whose text is complete."""
        self._pending = ""
        """Complete text that is not sent yet."""
        self._shown: list[str] = []
        self._stopped = False

    @property
    def shown(self) -> str:
        """All text sent so far."""
        return "".join(self._shown)

    def add(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that can be sent now."""
        self._ids += [int(token) for token in token_ids]
        done = self._complete()
        if done > self._done:
            self._pending += self._new(done)
            self._from = self._done
            self._done = done
        return self._show(keep=max((_overlap(self._pending, stop) for stop in self._stop), default=0))

    def end(self) -> str:
        """Returns the rest of the text."""
        text = self._reading.text(self._ids, self._stop)
        shown = self.shown
        if text.startswith(shown):
            self._pending = text[len(shown) :]
        else:  # a tokenizer whose text depends on more than the previous token
            self._pending += self._new(len(self._ids))
        return self._show(keep=0)

    def _complete(self) -> int:
        """Returns the number of tokens whose text is not changed by further tokens."""
        count = len(self._ids)
        text = self._decode(self._from, count)
        if not text.endswith("\ufffd"):
            return count
        if count - self._done > WAITING:  # too many for one character: invalid bytes
            for end in range(count - 1, count - 5, -1):
                earlier = self._decode(self._from, end)
                if len(earlier) < len(text) and text.startswith(earlier):
                    return end
        return self._done

    def _new(self, end: int) -> str:
        """Returns the text of the tokens from `_done` to `end`."""
        return self._decode(self._from, end)[len(self._decode(self._from, self._done)) :]

    def _show(self, keep: int) -> str:
        """Returns the pending text without its last `keep` characters, up to a stop string."""
        if self._stopped:
            return ""
        new = cut(self._pending, self._stop)
        self._stopped = len(new) < len(self._pending)
        if not self._stopped:
            new = new[: len(new) - keep]
        self._pending = self._pending[len(new) :]
        self._shown.append(new)
        return new

    def _decode(self, start: int, stop: int) -> str:
        return self._reading.tokenizer.decode(self._ids[start:stop], skip_special_tokens=True)


def split(text: str) -> tuple[str, str]:
    """Splits a text into its thinking and its answer."""
    thought, ends, answer = text.rpartition(THOUGHT_ENDS)
    if not ends:
        return "", text
    return thought.replace(THOUGHT_BEGINS, "", 1).strip(), answer.strip()


def spoken(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Splits a text after its thinking, which may be opened again before a call. `opened`: it was opened in the prompt.
    Unclosed thinking takes the rest of the text."""
    start = 0
    if opened or THOUGHT_ENDS in text:
        start = _thought_end(text, 0)
    called = ATTEMPT.search(text, start)
    while (begins := text.find(THOUGHT_BEGINS, start)) >= 0 and (called is None or begins < called.start()):
        start = _thought_end(text, begins)
        if called is not None and called.start() < start:
            called = ATTEMPT.search(text, start)
    answer = text[start:].lstrip() if start else text
    return text[: len(text) - len(answer)], answer


def _thought_end(text: str, start: int) -> int:
    """Returns the index after the thinking that is open at `start`; the end of the text if it is unclosed."""
    ends = text.find(THOUGHT_ENDS, start)
    return ends + len(THOUGHT_ENDS) if ends >= 0 else len(text)


def cut(text: str, stop: Sequence[str]) -> str:
    """Returns `text` up to the first stop string."""
    starts = [text.find(string) for string in stop if string in text]
    return text[: min(starts)] if starts else text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)


def written(calls: Sequence[ToolCall], request_index: int) -> list[Json]:
    """Converts calls to those of an assistant's message. Ids that the model wrote are kept if they are unique; others
    contain `request_index`."""
    ids = [call.id for call in calls]
    if None in ids or len(set(ids)) < len(ids):
        ids = [f"call_{request_index}_{index}" for index in range(len(calls))]
    return [
        {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for id, call in zip(ids, calls, strict=True)
    ]


def _is_object(call: ToolCall) -> bool:
    try:
        return isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        return False
