"""JSON of the proxy is read and written as by Python's json, and tokens of known messages are not made again."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from typing import Any

import pytest

from slimx.data.chat.tokens import PromptIds, encode_chat
from slimx.extras.agents.proxy.apis.openai_chat import CHAT
from slimx.extras.agents.proxy.bodies import RequestBody, decoded, encoded, identity
from slimx.extras.agents.proxy.conversations import STARTS, Conversations
from slimx.extras.agents.proxy.errors import ApiError
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.extras.agents.proxy.session import QUICK, Session, SessionLimits
from tests.extras.agents.proxy_stand import TOOLS, USER, Script, context, tokenizer

TEXTS = (
    '"\\ud800"',
    '"\\ud83d\\ude00"',
    "[NaN, Infinity, -Infinity]",
    "1e999",
    "-0",
    "123456789012345678901234567890",
    '{"a": 1, "a": [2.0, 2, true, null]}',
    '"\\u0000\\u2028é"',
)


@pytest.mark.parametrize("text", TEXTS)
def test_json_is_read_as_by_python(text: str):
    assert repr(decoded(text)) == repr(decoded(text.encode())) == repr(json.loads(text))


@pytest.mark.parametrize("text", ["", "[1,]", "01", '"a\nb"', "[1] 2", "\ufeff1", "1" * 5000])
def test_what_is_no_json_is_refused(text: str):
    with pytest.raises(ApiError) as caught:
        RequestBody(text.encode(), "utf-8").parsed()
    assert caught.value.code == "invalid_json"


def test_values_that_differ_have_different_identities():
    values: list[Any] = [None, math.nan, math.inf, "null", 1, 1.0, True, "1", "\ud800", "\\ud800", [], {}, [None], [[]]]
    values += [{"a": 1, "b": 2}, {"a": 1, "b": None}, {"a": 1, "b": math.nan}]
    assert len({identity(value, "sorted") for value in values}) == len(values)
    assert identity({"b": None, "a": 1}, "sorted") == identity({"a": 1, "b": None}, "sorted")
    assert identity({"b": 1, "a": 1}) != identity({"a": 1, "b": 1}), "a template may show the order of keys"


def test_a_lone_surrogate_is_sent_back_escaped():
    assert json.loads(encoded({"model": "\ud800é"})) == {"model": "\ud800é"}


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages of each call of `encode_chat`."""
    found: list[Any] = []

    def watched(tokenizer: Any, messages: Any, tools: Any = None) -> list[int]:
        found.append(messages)
        return encode_chat(tokenizer, messages, tools)

    monkeypatch.setattr("slimx.extras.agents.proxy.conversations.encode_chat", watched)
    return found


def session_of(prompt_ids: PromptIds | None) -> Session:
    ctx = dataclasses.replace(context(Script(*"2" * 9), None), prompt_ids=prompt_ids)
    return Session(ctx, None, SessionLimits(context=10_000, requests=9))  # type: ignore[arg-type]  # it only counts


async def count(proxy: ChatProxy, session: Session, **fields: Any) -> int:
    """The length of a prompt in tokens."""
    async with proxy.session(session):
        body = RequestBody(json.dumps({"messages": USER} | fields).encode(), "utf-8")
        return await session.count(CHAT, body, None)  # type: ignore[arg-type]


async def test_rollouts_of_a_group_tokenize_the_same_start_once(encodings: list[Any]):
    proxy, group, other = ChatProxy(context=10_000), PromptIds(tokenizer()), PromptIds(tokenizer())
    try:
        lengths = [await count(proxy, session_of(ids)) for ids in (group, group, other, None)]
        assert len(set(lengths)) == 1 and len(encodings) == 3
        reordered = [dict(reversed(TOOLS[0].items()))]
        for tools in (TOOLS, reordered, TOOLS, reordered):
            await count(proxy, session_of(group), tools=tools)
        assert len(encodings) == 5, "the order of a tool's keys is part of what the model reads"
    finally:
        await proxy.stop()


def test_shared_starts_are_those_that_would_be_made():
    first, second = Conversations(tokenizer()), Conversations(tokenizer())
    second.starts = first.starts
    for number in range(STARTS + 2):
        place = first.locate([{"role": "user", "content": f"{number}+1="}], TOOLS)
        assert first.known(place) is None
        made = first.tokenized(place)
        first.share(place, made)
        assert second.known(second.locate([{"role": "user", "content": f"{number}+1="}], TOOLS)) == made
    assert len(first.starts) == STARTS


async def test_only_long_messages_take_a_thread(monkeypatch: pytest.MonkeyPatch):
    here: list[bool] = []

    def watched(*args: Any) -> list[int]:
        here.append(threading.current_thread() is threading.main_thread())
        return encode_chat(*args)

    monkeypatch.setattr("slimx.extras.agents.proxy.conversations.encode_chat", watched)
    proxy = ChatProxy(context=10_000)
    try:
        for text in ("1+1=", "x" * 2 * QUICK):
            await count(proxy, session_of(None), messages=[{"role": "user", "content": text}])
    finally:
        await proxy.stop()
    assert here == [True, False]
