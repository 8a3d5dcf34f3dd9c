"""Requests that no client's library sends are refused; none is the server's fault, or makes an answer grow."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from slimx.extras.agents.proxy.answer import AnswerReader
from slimx.extras.agents.proxy.apis.openai_chat import CHAT
from slimx.extras.agents.proxy.bodies import RequestBody
from slimx.extras.agents.proxy.errors import SHOWN, ApiError
from slimx.extras.agents.proxy.session import Session, SessionLimits
from slimx.rollout.hooks import GivenUp
from tests.extras.agents.proxy_stand import TOOLS, USER, Script, context, rollout, tokenizer

HANGS_S = 60.0
LONG = "y" * 100_000
CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", *headers]
    if not any(line.startswith("Transfer-Encoding") for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def statuses(requests: list[tuple[str, bytes, tuple[str, ...]]]) -> list[tuple[int, int]]:
    """Status and length of each response; nothing is sampled."""
    found = []

    async def send(client: Any, prompt: Any) -> None:
        url = urlsplit(str(client.base_url))
        for path, body, headers in requests:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(request(url.path + path, body, *headers))
            answer = await asyncio.wait_for(reader.read(), HANGS_S)
            writer.close()
            found.append((int(answer[9:12]), len(answer)))

    with pytest.raises(GivenUp):
        await rollout(Script(), send)
    return found


async def test_bodies_that_are_no_http_are_refused_and_none_is_inflated(caplog):
    chunked = "Transfer-Encoding: chunked"
    sent = [
        (zlib.compress(bytes(10**7)), ("Content-Encoding: deflate",)),
        (b"no gzip", ("Content-Encoding: gzip",)),
        (b"zz\r\nxx\r\n", (chunked,)),
        (b"2\r\n{}\r\n0\r\n" + b"X: a\r\n" * 20_000 + b"\r\n", (chunked,)),
    ]
    found = await statuses([("chat/completions", body, headers) for body, headers in sent])
    assert [status for status, _ in found] == [415, 415, 400, 400]
    assert len(caplog.records) <= 1


async def test_a_refusal_and_an_answer_do_not_repeat_what_is_long():
    chat, responses = {"model": "m", "messages": USER}, {"model": "m", "input": "1"}
    messages = {**chat, "max_tokens": 9}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {**chat, LONG: 1}),
        ("chat/completions", {**chat, "n": LONG}),
        ("chat/completions", {**chat, "model": LONG}),
        ("chat/completions", {**chat, "max_tokens": -(10**4000)}),
        ("responses", {**responses, "include": LONG}),
        ("responses", {**responses, "model": [LONG]}),
        ("messages", {**messages, "thinking": LONG}),
        ("messages", {**messages, "model": LONG}),
        ("chat/completions", {**chat, "messages": [{"role": "tool", "content": "", "tool_call_id": LONG}]}),
        ("chat/completions", {**chat, "messages": [{"role": "user", "content": "", "name": LONG}]}),
    ]
    found = await statuses([(path, json.dumps(body).encode(), ()) for path, body in bodies])
    assert [status for status, _ in found] == [400] * len(bodies)
    assert max(length for _, length in found) < 4 * SHOWN


async def test_a_tool_call_of_wrong_types_is_refused():
    bodies = []
    for wrong in ({"id": {"a": 1}}, {"id": [1]}, {"function": {"name": {}}}, {"function": 5}):
        turn = {"role": "assistant", "content": None, "tool_calls": [CALLED | wrong]}
        bodies.append({"model": "m", "messages": [*USER, turn, {"role": "tool", "tool_call_id": "c", "content": "2"}]})
    found = await statuses([("chat/completions", json.dumps(body).encode(), ()) for body in bodies])
    assert [status for status, _ in found] == [400] * len(bodies)


async def test_a_field_of_another_type_is_refused():
    chat, responses = {"model": "m", "messages": USER}, {"model": "m", "input": "1"}
    messages = {**chat, "max_tokens": 9}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {**chat, "stream": "x"}),
        ("chat/completions", {**chat, "logprobs": {}}),
        ("chat/completions", {**chat, "model": 5}),
        ("chat/completions", {**chat, "stream": True, "stream_options": {"include_usage": "x"}}),
        ("chat/completions", {**chat, "temperature": "x"}),
        ("chat/completions", {**chat, "messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
        ("chat/completions", {**chat, "messages": [{"role": "user", "content": "", "name": 5}]}),
        ("chat/completions", {**chat, "messages": [{"role": "user", "content": "", "tool_calls": {}}]}),
        ("responses", {**responses, "stream": "x"}),
        ("responses", {**responses, "temperature": []}),
        ("messages", {**messages, "stream": 1}),
        ("messages", {**messages, "top_p": "x"}),
    ]
    found = await statuses([(path, json.dumps(body).encode(), ()) for path, body in wrong])
    assert [status for status, _ in found] == [400] * len(wrong)


async def test_a_grammar_is_not_made_in_the_event_loop():
    """The import of xgrammar takes seconds, during which no other agent would be answered."""
    threads = []

    class Reading(AnswerReader):
        def grammar(self, request):
            threads.append(threading.current_thread())
            return "root ::= [a]"

    session = Session(context(Script("2"), None), Reading(tokenizer(), None), SessionLimits(context=1000, requests=9))
    body = {"model": "m", "messages": USER, "tools": TOOLS, "tool_choice": "required"}
    with ThreadPoolExecutor(1) as tokenizing, pytest.raises(ApiError):
        await session.answer(CHAT, RequestBody(json.dumps(body).encode(), "utf-8"), None, tokenizing)
    assert threads and threads[0] is not threading.main_thread()
