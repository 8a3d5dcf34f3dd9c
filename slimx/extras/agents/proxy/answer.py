"""Messages made from sampled tokens: text, reasoning and tool calls, whole or as they arrive."""

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
"""Tokens at the end of a prompt in which a chat template opens the thinking, if it does."""
WAITING = 8
"""Tokens that may wait for the rest of a character: it has 4 bytes at most."""


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Turns sampled tokens into a message."""

    tokenizer: Any
    parse_tools: ToolParser
    separates_reasoning: bool = False
    """True if what stands before </think> is `reasoning_content`."""
    parser: str = "hermes"
    """Name of `parse_tools`."""

    def text(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Without special tokens, up to the first stop string."""
        return cut(self.tokenizer.decode(list(token_ids), skip_special_tokens=True), stop)

    def stopped_by(self, token_ids: Sequence[int], stop: Sequence[str]) -> str | None:
        """The stop string that ended the answer; None if none did."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return min((each for each in stop if each in text), key=text.find, default=None)

    def opened(self, after: Sequence[int]) -> bool:
        """True if the thinking is open behind the prompt `after`, because the chat template opened it."""
        return (
            self.tokenizer.decode(list(after[-OPEN_TAIL:]), skip_special_tokens=False).rstrip().endswith(THOUGHT_BEGINS)
        )

    async def calls(
        self, token_ids: Sequence[int], tools: list[Json], *, after: Sequence[int], stop: Sequence[str] = ()
    ) -> Calls:
        """The calls behind an answer's thinking: one that the model only thinks of is not made. `after`: the tokens
        before the answer."""
        thought, answer = spoken(self.raw(token_ids, stop), opened=self.opened(after))
        content, calls = await self.parse_tools(answer, tools)
        return Calls(thought, content, calls, ATTEMPT.search(answer) is not None)

    def grammar(self, request: ChatRequest) -> str | None:
        """The grammar by which the engine makes the calls that `request` forces; None if it forces none.

        Raises ApiError where no grammar is known for the tool parser."""
        if request.forced is None:
            return None
        if self.parser not in GRAMMARS:
            text = f"tools cannot be forced with rollout.options.tool_parser {self.parser}, but with {GRAMMARS}"
            raise ApiError(text, code="unsupported_value", param="tool_choice")
        return grammar(request.forced, request.tools or [], thinks=self.separates_reasoning)

    def pieces(self, request: ChatRequest) -> Pieces | None:
        """For an answer that can be shown while it is sampled; None where it has to be read as a whole first."""
        return None if request.calls_tools or self.separates_reasoning else Pieces(self, request.stop)

    async def message(
        self, token_ids: Sequence[int], request: ChatRequest, number: int, *, after: Sequence[int]
    ) -> tuple[Message, bool]:
        """The assistant's message, as the API tells it, and True if a tool call begins in it. `number` makes the ids of
        calls unique; `after`: the tokens before the answer."""
        text, thought = self.text(token_ids, request.stop), ""
        if self.separates_reasoning:
            thought, text = split(text)
        message: Message = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        if not request.calls_tools:
            return message, False
        found = await self.calls(token_ids, request.tools or [], after=after, stop=request.stop)
        if found.calls and not (request.object_arguments and not all(_is_object(call) for call in found.calls)):
            message["content"] = (found.content if self.separates_reasoning else found.text) or None
            message["tool_calls"] = written(found.calls, number)
        return message, found.attempted

    def raw(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """The text with the special tokens in it by which some models mark their calls, but without the end token."""
        ids = list(token_ids)
        if ids and ids[-1] in self.tokenizer.all_special_ids:
            ids.pop()
        return cut(self.tokenizer.decode(ids, skip_special_tokens=False), stop)


@dataclass(frozen=True, slots=True)
class Calls:
    """Tool calls of an answer, and the text around them."""

    thought: str
    """The text up to the end of the thinking; "" without any."""
    content: str
    """The rest of the text without its calls."""
    calls: list[ToolCall]
    attempted: bool
    """True if a call begins, whether or not any can be read."""

    @property
    def text(self) -> str:
        """The text without its calls, thinking included."""
        return (self.thought + self.content).strip()


class Pieces:
    """The text of an answer whose tokens arrive one by one. What was shown never changes: characters whose bytes have
    not all come, and what may be the beginning of a stop string, are held back."""

    def __init__(self, reading: AnswerReader, stop: Sequence[str]) -> None:
        self._reading, self._stop = reading, stop
        self._ids: list[int] = []
        self._from = self._done = 0
        """Tokens are decoded from `_from` on, and those before `_done` are in the text: some context, because a token's
        text may depend on the one before it."""
        self._held = ""
        """Text of the tokens before `_done` that is not shown yet."""
        self._shown: list[str] = []
        self._stopped = False

    @property
    def shown(self) -> str:
        """All the text that was shown."""
        return "".join(self._shown)

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that can be shown now."""
        self._ids += [int(token) for token in token_ids]
        done = self._complete()
        if done > self._done:
            self._held += self._new(done)
            self._from, self._done = self._done, done
        return self._show(held=max((_begun(self._held, stop) for stop in self._stop), default=0))

    def end(self) -> str:
        """The rest."""
        text, shown = self._reading.text(self._ids, self._stop), self.shown
        if text.startswith(shown):
            self._held = text[len(shown) :]
        else:  # a tokenizer whose text depends on more than the token before
            self._held += self._new(len(self._ids))
        return self._show(held=0)

    def _complete(self) -> int:
        """Number of tokens whose text no further token changes."""
        count = len(self._ids)
        text = self._decode(self._from, count)
        if not text.endswith("\ufffd"):
            return count
        if count - self._done > WAITING:  # more than one character: bytes that are none
            for end in range(count - 1, count - 5, -1):
                earlier = self._decode(self._from, end)
                if len(earlier) < len(text) and text.startswith(earlier):
                    return end
        return self._done

    def _new(self, end: int) -> str:
        """The text that the tokens from `_done` to `end` add."""
        return self._decode(self._from, end)[len(self._decode(self._from, self._done)) :]

    def _show(self, held: int) -> str:
        """Show the text that waits but for its last `held` characters, up to a stop string."""
        if self._stopped:
            return ""
        whole = cut(self._held, self._stop)
        self._stopped = len(whole) < len(self._held)
        new = whole if self._stopped else whole[: len(whole) - held]
        self._held = self._held[len(new) :]
        self._shown.append(new)
        return new

    def _decode(self, start: int, stop: int) -> str:
        return self._reading.tokenizer.decode(self._ids[start:stop], skip_special_tokens=True)


def split(text: str) -> tuple[str, str]:
    """Splits a text into what was thought and the answer."""
    thought, ends, answer = text.rpartition(THOUGHT_ENDS)
    return (thought.replace(THOUGHT_BEGINS, "", 1).strip(), answer.strip()) if ends else ("", text)


def spoken(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Splits a text behind its thinking, which may begin again until a call begins. `opened`: it began in the prompt.
    Thinking that does not end is all of the text."""
    start, found = 0, text.find(THOUGHT_ENDS)
    if opened or found >= 0:
        start = found + len(THOUGHT_ENDS) if found >= 0 else len(text)
    called = ATTEMPT.search(text, start)
    while (begins := text.find(THOUGHT_BEGINS, start)) >= 0 and (called is None or begins < called.start()):
        ends = text.find(THOUGHT_ENDS, begins)
        start = ends + len(THOUGHT_ENDS) if ends >= 0 else len(text)
        if called is not None and called.start() < start:
            called = ATTEMPT.search(text, start)
    answer = text[start:].lstrip() if start else text
    return text[: len(text) - len(answer)], answer


def cut(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first stop string."""
    ends = [at for each in stop if (at := text.find(each)) >= 0]
    return text[: min(ends)] if ends else text


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` may begin."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)


def written(calls: Sequence[ToolCall], number: int) -> list[Json]:
    """Calls as an assistant's message has them. Ids that the model wrote are kept if they tell its calls apart;
    `number` makes others unique."""
    ids = [call.id for call in calls]
    if None in ids or len(set(ids)) < len(ids):
        ids = [f"call_{number}_{index}" for index in range(len(calls))]
    return [
        {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for id, call in zip(ids, calls, strict=True)
    ]


def _is_object(call: ToolCall) -> bool:
    try:
        return isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        return False
