"""A server ends connections that ask nothing, makes room for those that do, and reports once that it accepts none."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from slimx.extras.http.connections import Connections

HANGS_S = 120.0


@asynccontextmanager
async def serving(connections: Connections, answer: asyncio.Event | None = None) -> AsyncIterator[int]:
    """Yields the port of a server whose answers wait for `answer`."""

    async def handle(request: web.Request) -> web.Response:
        if answer is not None:
            await answer.wait()
        return web.Response(text="here")

    app = web.Application()
    app.router.add_get("/", handle)
    server = await connections.listen(app, "127.0.0.1", 0)
    try:
        yield server.port
    finally:
        await server.close()


async def opened(port: int, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


async def received(reader: asyncio.StreamReader, size: int = -1) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(size), HANGS_S)
    except ConnectionResetError:
        return b""


ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n", b"\r\n", ASK])
async def test_an_idle_connection_is_closed_after_the_idle_timeout(sent: bytes):
    answer, connections = asyncio.Event(), Connections(most=9, idle=HANGS_S if sent == ASK else 0.3)
    async with serving(connections, answer) as port:
        reader, writer = await opened(port, sent)
        if sent == ASK:
            while connections._waiting or not len(connections):  # until it has arrived, however loaded the machine is
                await asyncio.sleep(0.01)
            connections._idle = 0.3
            answer.set()
        assert (b"here" in await received(reader)) == (sent == ASK)
        writer.close()
    assert len(connections) == connections.refused == 0


async def test_bytes_that_trickle_in_do_not_keep_a_connection_open():
    async with serving(Connections(most=9, idle=0.5)) as port:
        reader, writer = await opened(port, b"GET / HTTP/1.1\r\n")
        ended, start = asyncio.ensure_future(received(reader)), time.monotonic()
        while not ended.done():
            writer.write(b"X: y\r\n")
            await asyncio.sleep(0.05)
            assert time.monotonic() < start + HANGS_S
        assert await ended == b""
        writer.close()


async def test_a_request_that_takes_longer_than_the_idle_time_is_answered():
    answer = asyncio.Event()
    async with serving(Connections(most=9, idle=5.0), answer) as port:  # in which ASK must arrive
        reader, writer = await opened(port, ASK)
        await asyncio.sleep(5.2)
        answer.set()
        assert b"here" in await received(reader, 4096)
        writer.close()


async def test_the_longest_idle_connection_makes_room_for_new_ones():
    answer, connections = asyncio.Event(), Connections(most=3, idle=HANGS_S)
    async with serving(connections, answer) as port:
        busy = [await opened(port, ASK) for _ in range(2)]
        idle = [await opened(port)]
        while len(connections._waiting) != 1 or len(connections) != 3:
            await asyncio.sleep(0.01)
        busy.append(await opened(port, ASK))
        assert await received(idle[0][0]) == b""
        while connections._waiting:
            await asyncio.sleep(0.01)
        late = await opened(port, ASK)
        assert await received(late[0]) == b"", "all three are being answered"
        answer.set()
        assert all([b"here" in await received(reader, 4096) for reader, _ in busy])
        assert connections.refused == 2
        for _, writer in [*busy, *idle, late]:
            writer.close()


async def test_malformed_requests_are_counted_and_one_line_a_minute_is_written(caplog):
    connections = Connections(most=9, idle=HANGS_S)
    async with serving(connections) as port:
        for _ in range(9):
            reader, writer = await opened(port, ASK + b"GET /\x00 HTTP/1.1\r\nHost: x\r\nX\r\n\r\n")
            assert b"400 Bad Request" in await received(reader)
            writer.close()
    assert connections.malformed == 9
    assert caplog.text.count("\n") == len(caplog.records) == 1


async def test_an_error_of_the_server_is_logged_in_full(caplog):
    answer = asyncio.Event()
    answer.wait = None  # type: ignore[assignment, method-assign]
    async with serving(Connections(most=9, idle=HANGS_S), answer) as port:
        reader, writer = await opened(port, ASK)
        assert b"500 Internal" in await received(reader)
        writer.close()
    assert "Traceback" in caplog.text and "TypeError" in caplog.text


def test_a_lack_of_descriptors_is_reported_once():
    program = textwrap.dedent("""
        import asyncio
        from aiohttp import web
        from slimx.extras.http.connections import Connections

        async def main():
            server = await Connections(most=10**6, idle=600).listen(web.Application(), "127.0.0.1", 0)
            print(server.port, flush=True)
            await asyncio.to_thread(input)
            asyncio.get_running_loop().call_exception_handler({"message": "something else"})

        asyncio.run(main())
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (40, 40))

    async def crowd() -> None:
        connections = [await opened(port) for _ in range(80)]
        await asyncio.sleep(2.5)  # asyncio tries again each second
        for _, writer in connections:
            writer.close()

    asyncio.run(crowd())
    _, written = process.communicate("\n", timeout=HANGS_S)
    assert written.count("\n") == 2 and written.count("Too many open files") == 1 and "something else" in written
