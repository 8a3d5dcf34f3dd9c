"""Converts sampled tokens to assistant messages: text, reasoning and tool calls, as a whole or incrementally.

The *thinking* of a response is its reasoning text, which ends with </think>.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimx.data.chat.responses import THOUGHT_BEGINS, THOUGHT_ENDS
from slimx.extras.agents.proxy.bodies import decoded
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.agents.proxy.request import ChatRequest, Json, Message
from slimx.extras.agents.proxy.tool_calls import ATTEMPT, ToolCall, ToolParser
from slimx.extras.agents.proxy.tool_choice import GRAMMARS, grammar

OPEN_TAIL = 16
"""Number of tokens at the end of a prompt that are searched for a <think> from the chat template."""
WAITING = 8
"""Maximum number of tokens held back until a character is complete; a character has up to 4 bytes."""


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Converter of sampled tokens to an assistant message."""

    tokenizer: Any
    parse_tools: ToolParser
    separates_reasoning: bool = False
    """True to move the text before </think> from the content to `reasoning_content`."""
    parser: str = "hermes"
    """Name of the tool-call parser `parse_tools` in the configuration."""

    def text(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Returns the text of the tokens, without special tokens, up to the first occurrence of a stop string."""
        return cut(self.tokenizer.decode(list(token_ids), skip_special_tokens=True), stop)

    def stopped_by(self, token_ids: Sequence[int], stop: Sequence[str]) -> str | None:
        """Returns the stop string that ended the response; None if none did."""
        if not stop:
            return None
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return min((string for string in stop if string in text), key=text.find, default=None)

    def opened(self, after: Sequence[int]) -> bool:
        """Returns True if the prompt, whose tokens are `after`, ends with a <think> that the chat template added."""
        tail = self.tokenizer.decode(list(after[-OPEN_TAIL:]), skip_special_tokens=False)
        return tail.rstrip().endswith(THOUGHT_BEGINS)

    async def calls(
        self, token_ids: Sequence[int], tools: list[Json], *, after: Sequence[int], stop: Sequence[str] = ()
    ) -> Calls:
        """Parses the tool calls of a response. Ignores text within the thinking that looks like a call.

        `after`: tokens that the response follows. `stop`: stop strings; the first occurrence of any of them ends the
        text.
        """
        thought, answer = split_after_thinking(self.raw(token_ids, stop), opened=self.opened(after))
        content, calls = await self.parse_tools(answer, tools)
        return Calls(thought, content, calls, ATTEMPT.search(answer) is not None)

    def grammar(self, request: ChatRequest) -> str | None:
        """Returns the grammar that makes the model call the tools that `request` forces it to call; None if it forces
        no call.

        Raises ApiError if the tool parser has no grammar.
        """
        if request.forced is None:
            return None
        if self.parser not in GRAMMARS:
            text = f"tool_choice cannot force tools with tool_parser {self.parser}; use one of {', '.join(GRAMMARS)}"
            raise ApiError(text, code="unsupported_value", param="tool_choice")
        return grammar(request.forced, request.tools or [], thinks=self.separates_reasoning)

    def pieces(self, request: ChatRequest) -> Pieces | None:
        """Returns a converter for sending the response's text incrementally; None if the whole response must be parsed
        first."""
        if request.calls_tools or self.separates_reasoning:
            return None
        return Pieces(self, request.stop)

    async def message(
        self, token_ids: Sequence[int], request: ChatRequest, index: int, *, after: Sequence[int]
    ) -> tuple[Message, bool]:
        """Returns the assistant message in OpenAI's format, and whether a tool call begins in it.

        `index`: index of the request, which makes tool call ids unique. `after`: tokens that the response follows.
        """
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
            message["tool_calls"] = message_calls(found.calls, index)
        return message, found.attempted

    def raw(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Returns the text of the tokens up to the first occurrence of a stop string, without the stop token. Includes
        special tokens, because they mark tool calls in the output of some models."""
        ids = list(token_ids)
        if ids and ids[-1] in self.tokenizer.all_special_ids:
            ids.pop()
        return cut(self.tokenizer.decode(ids, skip_special_tokens=False), stop)


@dataclass(frozen=True, slots=True)
class Calls:
    """Tool calls of a response, and the text around them."""

    thought: str
    """Text up to the end of the thinking; "" if there is none."""
    content: str
    """Text after the thinking, without the tool calls."""
    calls: list[ToolCall]
    attempted: bool
    """True if a call begins in the text, even if it cannot be parsed."""

    @property
    def text(self) -> str:
        """Text of the response, with the thinking but without tool calls."""
        return (self.thought + self.content).strip()


class Pieces:
    """Incremental converter of sampled tokens to text that can be sent to the agent.

    Sent text never changes: incomplete characters, and a possible start of a stop string, are held back.
    """

    def __init__(self, reading: AnswerReader, stop: Sequence[str]) -> None:
        self._reading = reading
        self._stop = stop
        self._ids: list[int] = []
        self._from = 0
        """Index of the first token to decode again, because a token's text may depend on the token before it."""
        self._done = 0
        """Number of tokens whose text is complete."""
        self._pending = ""
        """Complete text that has not been sent."""
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
        """Returns the text that remains to be sent once the response has ended."""
        text = self._reading.text(self._ids, self._stop)
        shown = self.shown
        if text.startswith(shown):
            self._pending = text[len(shown) :]
        else:  # the tokenizer's text depends on more than the previous token
            self._pending += self._new(len(self._ids))
        return self._show(keep=0)

    def _complete(self) -> int:
        """Returns the number of leading tokens whose text cannot change when more tokens arrive."""
        count = len(self._ids)
        text = self._decode(self._from, count)
        if not text.endswith("\ufffd"):
            return count
        if count - self._done > WAITING:  # too many tokens for one character, so the bytes are invalid
            for end in range(count - 1, count - 5, -1):
                earlier = self._decode(self._from, end)
                if len(earlier) < len(text) and text.startswith(earlier):
                    return end
        return self._done

    def _new(self, end: int) -> str:
        """Returns the text of the tokens from index `_done` to `end`, exclusive."""
        return self._decode(self._from, end)[len(self._decode(self._from, self._done)) :]

    def _show(self, keep: int) -> str:
        """Returns the pending text without its last `keep` characters, up to the first occurrence of a stop string, and
        records it as sent."""
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
    """Splits text into the thinking and the answer, both without the tags around the thinking."""
    thought, ends, answer = text.rpartition(THOUGHT_ENDS)
    if not ends:
        return "", text
    return thought.replace(THOUGHT_BEGINS, "", 1).strip(), answer.strip()


def split_after_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Splits text where the thinking ends; thinking that the model resumes before a tool call counts as part of it.

    `opened`: True if the prompt ends with <think>. Thinking without </think> extends to the end of the text.
    """
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
    """Returns the index after the </think> that follows `start`, or the length of the text if there is none."""
    ends = text.find(THOUGHT_ENDS, start)
    return ends + len(THOUGHT_ENDS) if ends >= 0 else len(text)


def cut(text: str, stop: Sequence[str]) -> str:
    """Returns `text` before the first occurrence of any of the strings in `stop`; all of `text` if none occurs."""
    starts = [text.find(string) for string in stop if string in text]
    return text[: min(starts)] if starts else text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)


def message_calls(calls: Sequence[ToolCall], request_index: int) -> list[Json]:
    """Converts tool calls to the format in which an assistant message contains them.

    Keeps the ids that the model wrote if they are unique; otherwise creates ids that contain `request_index`.
    """
    ids = [call.id for call in calls]
    if None in ids or len(set(ids)) < len(ids):
        ids = [f"call_{request_index}_{index}" for index in range(len(calls))]
    return [
        {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for id, call in zip(ids, calls, strict=True)
    ]


def _is_object(call: ToolCall) -> bool:
    try:
        return isinstance(decoded(call.arguments), dict)
    except (ValueError, RecursionError):
        return False
