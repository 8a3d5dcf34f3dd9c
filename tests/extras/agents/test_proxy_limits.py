"""Agents that send too much, too slowly or nonsense: each is refused by name, and no other agent waits for it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from slimx.extras.agents import agent
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.extras.agents.proxy.session import QUICK, TOKEN_CHARACTERS
from tests.extras.agents.proxy_stand import PROMPT, Script, bare, context
from tests.waits import until

USER = [{"role": "user", "content": "1+1="}]


async def served(function: Any, *, tokens: int = 1000, proxy: ChatProxy | None = None) -> Any:
    """Returns the result of `async def function(url)`, run as the agent of a rollout."""
    found: list[Any] = []

    async def act(url: str, prompt: Any) -> None:
        found.append(await function(url))
        async with aiohttp.ClientSession() as http:  # an agent that sampled nothing would be given up
            await http.post(f"{url}/chat/completions", json={"messages": USER})

    bare.function = act
    proxy = proxy or ChatProxy(context=tokens)
    try:
        await agent.generate(
            context(Script("2", "2", "2"), proxy), PROMPT, agent="tests.extras.agents.proxy_stand.bare"
        )
    finally:
        await proxy.stop()
    return found[0]


async def post(url: str, data: bytes, content_type: str = "application/json") -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/chat/completions", data=data, headers={"Content-Type": content_type}) as answer,
    ):
        return answer.status, (await answer.json())["error"]


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": USER, **fields}).encode()


CALLS = [{"role": "assistant", "content": "", "tool_calls": 5}, *USER]
NONSENSE: dict[str, tuple[bytes, str, str]] = {
    "a body that is nested too deeply": (
        b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        "application/json",
        "body",
    ),
    "options that are no object": (body(stream_options=[]), "application/json", "stream_options"),
    "calls that are no list": (body(messages=CALLS), "application/json", "messages[0].tool_calls"),
    "an unknown charset": (body(), "application/json; charset=no-such", "Content-Type"),
    "bytes that are no text": (b'{"messages": "\xff"}', "application/json", "body"),
}


@pytest.mark.parametrize("case", NONSENSE)
async def test_nonsense_is_refused_with_the_name_of_the_field(case: str):
    data, content_type, param = NONSENSE[case]
    status, error = await served(lambda url: post(url, data, content_type))
    assert (status, error["param"]) == (400, param)


async def test_arguments_nested_too_deeply_are_shown_to_the_model_unparsed():
    deep = "[" * 100_000
    turns = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}, *USER]
    status, error = await served(lambda url: post(url, body(messages=turns)))
    assert (status, error["code"]) == (400, "context_length_exceeded"), "the length is what is wrong with them"


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch):
    long = [{"role": "user", "content": "x" * (1000 * TOKEN_CHARACTERS + 1)}]
    tokenized: list[int] = []

    def watched(tokenizer: Any, messages: Any, *args: Any, **named: Any) -> list[int]:
        tokenized.append(sum(len(message["content"]) for message in messages))
        return [1]

    monkeypatch.setattr("slimx.extras.agents.proxy.conversations.encode_chat", watched)
    status, error = await served(lambda url: post(url, body(messages=long)))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert tokenized == [len("1+1=")]


async def test_a_body_that_no_context_could_fill_is_refused():
    status, error = await served(lambda url: post(url, body(user="x" * 2**21)), tokens=100)
    assert (status, error["code"]) == (413, "body_too_large")


async def test_the_loop_goes_on_while_messages_become_tokens(monkeypatch: pytest.MonkeyPatch):
    begun, turned = threading.Event(), threading.Event()
    long = [{"role": "user", "content": "x" * 2 * QUICK}]

    def slow(*args: Any, **named: Any) -> list[int]:
        begun.set()
        turned.wait(60)
        return [1]

    monkeypatch.setattr("slimx.extras.agents.proxy.conversations.encode_chat", slow)

    async def turns_of_the_loop(url: str) -> int:
        async with aiohttp.ClientSession() as http:
            response = asyncio.ensure_future(http.post(f"{url}/chat/completions", json={"messages": long}))
            turns = 0
            while not response.done():
                await asyncio.sleep(0.01)
                turns += begun.is_set()
                if turns == 10:
                    turned.set()
            return turns

    assert await served(turns_of_the_loop) >= 10, "the loop turned while the tokenizer was at work"


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(url)
    return await asyncio.open_connection(place.hostname, place.port)


async def ended(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"POST /x HTTP/1.1\r\nHost: x\r\n", b"\r\n"])
async def test_a_connection_that_never_asks_is_ended(sent: bytes):
    proxy = ChatProxy(context=1000)
    proxy.idle_deadline = 0.5

    async def half_open(url: str) -> bytes:
        reader, writer = await connect(url)
        writer.write(sent)
        found = await ended(reader)
        writer.close()
        return found

    assert await served(half_open, proxy=proxy) == b""


async def test_waiting_for_a_request_body_ends_at_the_deadline():
    proxy = ChatProxy(context=1000)
    proxy.body_deadline = 0.5

    async def half_sent(url: str) -> bytes:
        reader, writer = await connect(url)
        path = urlsplit(url).path + "/chat/completions"
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 99\r\n\r\n{{".encode())
        found = await ended(reader)
        writer.close()
        return found

    answer = await served(half_sent, proxy=proxy)
    assert answer.startswith(b"HTTP/1.1 408") and b"body_deadline" in answer


async def test_connections_beyond_the_bound_are_closed_and_counted():
    proxy = ChatProxy(context=1000)
    proxy.connections = 3

    async def many(url: str) -> list[bytes]:
        opened = [await connect(url) for _ in range(5)]
        reading = [asyncio.create_task(ended(reader)) for reader, _ in opened]
        await until(lambda: sum(task.done() for task in reading) >= 2)
        await asyncio.sleep(0.5)
        closed = [task.result() for task in reading if task.done()]
        for _, writer in opened:
            writer.close()
        await until(lambda: len(proxy._open) == 0)  # else the next one would need room
        return closed

    assert await served(many, proxy=proxy) == [b"", b""]
    assert proxy._open.refused == 2
