"""Everything that reads sampled text takes time in proportion to its length, whatever a policy degenerates to.

A row of READERS is a name, a function of a text, and texts that are hostile to it: a beginning, a unit that is repeated
up to the length, and an end. A reader of your own gets a row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from slimx.extras.agents.hubs.openenv import Fields
from slimx.extras.agents.hubs.views import Words, answered
from slimx.extras.agents.proxy.answer import AnswerReader, Pieces, cut, split, split_after_thinking
from slimx.extras.agents.proxy.request import ChatRequest
from slimx.extras.agents.proxy.tool_calls import ATTEMPT, WRITTEN_IDS, find_parser, gpt_oss, hermes
from slimx.extras.boxes.programs.answers import last_program, marked_answer
from tests.extras.agents.test_proxy_text import bytewise
from tests.unit.proportion import grows

GROWTH = 8
"""Limit of the growth of the time where the text is 4 times as long: between linear, 4, and quadratic, 16."""
FLOOR_S = 0.05
"""Below it times are noise, and count as this."""
LENGTHS = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
SHORT = 256_000
"""Characters without the tests that are slow: what is quadratic takes minutes for them."""
Shape = tuple[str, str, str]


class Reader(NamedTuple):
    name: str
    function: Callable[[str], Any]
    shapes: list[Shape]
    longest: int = LENGTHS[-1]
    """Characters, for a reader that takes long because it does much for each of them."""


def plain(*units: str) -> list[Shape]:
    """Returns shapes of a unit alone."""
    return [("", unit, "") for unit in units]


CALLS = [
    ("<tool_call>", "\n", ""),
    ("<tool_call>", " ", "</tool_call>"),
    ("<tool_call>", "[", ""),
    ('<tool_call>{"name": "f", "arguments": ', '{"a":', ""),
    ('<tool_call>{"name": "f", "arguments": {"a": "', "</tool_call>", ""),
    ('<tool_call>{"name": "f", "arguments": {"a": "', "\\", ""),
    ('<tool_call>{"name": "f", "arguments": {"a": ', "1", "}}</tool_call>"),
    *plain("<tool_call>", "</tool_call>", "<tool_call>{}", '<tool_call>{"name": "f"}</tool_call>', "<tool_call>\n"),
]
THOUGHTS = [
    *plain("<think>", "</think>", "<think></think>", "<think>\n<tool_call>", "</think><tool_call>", "<think></think> "),
    *plain("<think><answer>"),
    ("", "<think>", "</think>"),
    ("<tool_call>", "<think></think>", ""),
    ("", "<think></think>", "<tool_call>"),
]
HARMONY = [
    *plain("<|channel|>", "<|start|>", "<|message|>", "<|call|>", "to=functions.", "<|start|>assistant to=functions.f"),
    *plain("<|channel|>commentary to=functions.f<|message|>{}<|call|>", "<|channel|>final<|message|>", "<|"),
    ("<|channel|>commentary to=functions.", "f", ""),
    ("<|channel|>commentary to=functions.f<|message|>", "[", ""),
]
TAGS = [
    *plain("<answer>", "</answer>", "<action>", "<answer><action>", "<answer></action>", "<answer>x</answer>"),
    ("", "<answer>", "</answer>"),
    ("", "<answer><action>", "</action>"),
    ("<action>", "<answer>", "</action>"),
]
FENCES = [
    *plain("```", "```\n", "```python\n", "```python", "```py ", "`", "``` \t"),
    ("```python", " ", ""),
    ("```\n", "\n", ""),
    ("", "```python\n", "x"),
]
KIMI = [
    *plain("<|tool_call_begin|>", "<|tool_call_begin|> ", "<|tool_call_begin|>f:0", "<|tool_call_argument_begin|>"),
    ("<|tool_call_begin|>", " ", ""),
    ("<|tool_call_begin|>", "f", ""),
]
WORDS = [
    *plain("\n", " ", "a", "a ", "<", ">", "<a", "tool", "<tool", "[", "{", '"', "\\", "\x1b[41m", "\x1b[41m\x1b["),
    *plain("\u0301", "\u2028", "<a><b>", '{"a":[', "="),
]


def reader() -> AnswerReader:
    return AnswerReader(bytewise(), find_parser("hermes", ""))


def message(text: str) -> None:
    """Reads an answer as the proxy does, as a whole message."""
    answers, request = reader(), ChatRequest(messages=[], model="m", tools=[{}], calls_tools=True, stop=["###", "</"])
    ids, after = answers.tokenizer(text).input_ids, [1]
    asyncio.run(answers.message(ids, request, 0, after=after))


def streamed(text: str) -> None:
    """Reads a stream of single bytes."""
    pieces = Pieces(reader(), ["###", "ab" * 500, "<answer>"])
    for token in pieces._reading.tokenizer(text).input_ids:
        pieces.add([token])
    pieces.end()


def torn(text: str) -> None:
    """Reads a stream of bytes that are no characters."""
    pieces = Pieces(reader(), ["\ufffd\ufffdx"])
    first = pieces._reading.tokenizer("é").input_ids[0]
    for _ in text:
        pieces.add([first])
    assert len(pieces.shown) > len(text) - 20, "shown as they come"
    pieces.end()


class Seen:
    """An environment that repeats what the model wrote."""

    render_mode = None


READERS = [
    Reader("hermes", hermes, CALLS + WORDS),
    Reader("gpt-oss", gpt_oss, HARMONY + WORDS),
    Reader("ids of Kimi-K2", WRITTEN_IDS["kimik2"].findall, KIMI),
    Reader("attempts", ATTEMPT.search, [*CALLS, *HARMONY, *KIMI, *WORDS, *plain("<|start|>" + " " * 32)]),
    Reader("thinking", split_after_thinking, THOUGHTS + CALLS),
    Reader("reasoning", split, THOUGHTS),
    Reader("stop strings", lambda text: cut(text, ["a" * 999 + "b", "###"]), WORDS),
    Reader("a message", message, CALLS[:6] + THOUGHTS[:3], 64_000),
    Reader("a stream", streamed, [*plain("a", "#", "ab", "<answe", "e\u0301"), ("", "##", "#")], 4_000),
    Reader("a stream of bytes", torn, plain("a"), 4_000),
    Reader("the marked answer", marked_answer, TAGS),
    Reader("the program", last_program, FENCES),
    Reader("words for an environment", answered, TAGS + WORDS),
    Reader("an action's name", Words(Seen(), actions={"up": 1}).action, TAGS),
    Reader("an action's fields", Fields(None).action, TAGS + WORDS),
    Reader(
        "what a game shows", lambda text: Words(Seen()).show(text, {}), plain("\x1b[41m", "\x1b[41mx\x1b[0m", "\x1b[")
    ),
]


def seconds(function: Callable[[str], Any], shape: Shape, length: int) -> float:
    """Returns the CPU seconds of a call in this thread."""
    begins, unit, ends = shape
    text = begins + unit * ((length - len(begins) - len(ends)) // len(unit)) + ends
    began = time.thread_time()
    function(text)
    return time.thread_time() - began


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@pytest.mark.parametrize("longest", [SHORT, pytest.param(LENGTHS[-1], marks=pytest.mark.slow("a million characters"))])
def test_readers_of_sampled_text_take_time_in_proportion_to_its_length(reader, longest):
    for shape in dict.fromkeys(reader.shapes):
        for shorter, length in pairwise(x for x in LENGTHS if x <= min(longest, reader.longest)):
            short, long = (partial(seconds, reader.function, shape, x) for x in (shorter, length))
            assert not grows(short, long, GROWTH, FLOOR_S), (shape, length)


@pytest.mark.parametrize("parse", [hermes, gpt_oss, Fields(None).action])
def test_a_tool_call_nested_too_deeply_is_rejected(parse):
    deep = '{"a": ' * 100_000
    for text in (
        deep,
        f'<tool_call>{{"name": "f", "arguments": {deep}',
        f"<|channel|> to=functions.f<|message|>{deep}",
    ):
        assert parse(text) in ((text, []), None)
