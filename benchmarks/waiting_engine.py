"""The engine of benchmarks/rollout_waiting.py, which samples at an exact rate, and a clock that ignores the machine's
load. Like an engine of a run, it answers in the packed form of slimx.extras.packed_answers if a request asks for it."""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
from aiohttp import web


class QuietLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock runs as on a dedicated core. It counts the CPU time of this process, and jumps to the
    next timer while no thread works and no socket can be read or written. Both ends of every socket are in this
    process, so nothing can arrive during a jump."""

    def __init__(self) -> None:
        super().__init__()
        self._jumped, self._calls = 0.0, 0

    def time(self) -> float:
        return self._jumped + time.process_time()

    def run_in_executor[T](self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        self._calls += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._returned)
        return future

    def _returned(self, _: asyncio.Future[Any]) -> None:
        self._calls -= 1

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():  # no time passes for these
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._ready and not self._calls and self._scheduled and not self._selector.select(0):
            self._jumped += max(0.0, self._scheduled[0].when() - self.time())
        super()._run_once()


class Engine:
    """A server of SGLang's /generate in this process. It samples `slots` requests concurrently, each for `seconds`; the
    others wait in order. The end of a request is computed on arrival, so the rate is slots / seconds even if the server
    is woken late."""

    def __init__(self, token_ids: Sequence[int], slots: int, seconds: float):
        self._lists = {"output_token_logprobs": [[-0.5, token, None] for token in token_ids]}
        self._columns = {
            "token_ids": np.array(token_ids, np.int32).tobytes(),
            "logprobs": np.full(len(token_ids), -0.5, np.float32).tobytes(),
        }
        self._seconds = seconds
        self._free = [0.0] * slots
        """Times at which the slots become free."""
        self.open = self.done = 0
        """Number of requests in progress, and of answered ones."""

    def ends(self) -> float:
        """Occupies the slot that is free first, and returns the time at which it will have sampled a request."""
        ends = max(asyncio.get_running_loop().time(), heapq.heappop(self._free)) + self._seconds
        heapq.heappush(self._free, ends)
        return ends

    async def generate(self, request: web.Request) -> web.Response:
        """Returns the response once a slot has sampled it. A client that disconnects keeps its slot occupied."""
        body = await request.json()
        ends = self.ends()
        self.open += 1
        try:
            await asyncio.sleep(ends - asyncio.get_running_loop().time())
        finally:
            self.open -= 1
        self.done += 1
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "0"}
        if "packed" in json.loads(body.get("custom_labels", {}).get("slimx", "{}")):
            packed = msgspec.msgpack.encode({"meta_info": meta | self._columns})
            return web.Response(body=packed, content_type="application/msgpack")
        return web.json_response({"text": "", "meta_info": meta | self._lists})

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serves inside the block; yields the URL."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self.generate)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def canned(self, body: bytes) -> AsyncIterator[str]:
        """Serves the JSON `body` as the answer to every request inside the block, at the engine's rate and at hardly
        any cost; yields the URL."""
        response = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        loop = asyncio.get_running_loop()
        answer = response % (len(body), body)
        server = await loop.create_server(lambda: _Canned(self, answer), "127.0.0.1", 0, backlog=4096)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class _Canned(asyncio.Protocol):
    """Connection of the server of canned answers, one request at a time. It reads no more than a request's length."""

    def __init__(self, engine: Engine, answer: bytes) -> None:
        self._engine, self._answer = engine, answer
        self._received = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, complete, body = self._received.partition(b"\r\n\r\n")
        if complete and len(body) == int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0]):
            self._received = b""
            self._engine.open += 1
            asyncio.get_running_loop().call_at(self._engine.ends(), self._send)

    def _send(self) -> None:
        self._engine.open -= 1
        self._engine.done += 1
        self._transport.write(self._answer)
