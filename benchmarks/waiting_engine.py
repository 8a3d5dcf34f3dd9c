"""The engine of benchmarks/rollout_waiting.py: a server of SGLang's /generate that samples at an exact rate.

`slots` requests are sampled at once, each for `seconds`; the others wait in order. When a request is done is computed when
it comes, so that the rate is exact however late this process is woken: slots / seconds requests a second, no more."""

from __future__ import annotations

import asyncio
import heapq
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web


class Engine:
    """Answers every request with the same tokens."""

    def __init__(self, token_ids: Sequence[int], slots: int, seconds: float):
        self._entries = [[-0.5, token, None] for token in token_ids]
        self._seconds = seconds
        self._free = [0.0] * slots
        """Moments at which slots are free."""
        self.open = self.done = 0
        self._work = 0.0
        """Seconds of slots that were used so far."""

    async def generate(self, request: web.Request) -> web.Response:
        """Answer when a slot has sampled it; whoever goes away takes the slot along."""
        body = await request.json()
        loop = asyncio.get_running_loop()
        ends = max(loop.time(), heapq.heappop(self._free)) + self._seconds
        heapq.heappush(self._free, ends)
        self.open += 1
        try:
            await asyncio.sleep(ends - loop.time())
        finally:
            self.open -= 1
        self.done += 1
        meta = {
            "output_token_logprobs": self._entries,
            "finish_reason": {"type": "stop"},
            "weight_version": "0",
            "prompt_tokens": len(body["input_ids"]),
        }
        return web.json_response({"text": "", "meta_info": meta})

    async def counts(self, request: web.Request) -> web.Response:
        """Requests that are open, and those that were answered."""
        return web.json_response({"open": self.open, "done": self.done})


def _serve(ports: Any, token_ids: Sequence[int], slots: int, seconds: float) -> None:
    async def run() -> None:
        engine = Engine(token_ids, slots, seconds)
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", engine.generate)
        app.router.add_get("/counts", engine.counts)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        ports.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def engine(token_ids: Sequence[int], slots: int, seconds: float) -> Iterator[str]:
    """URL of an engine in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ports = context.SimpleQueue()
    process = context.Process(target=_serve, args=(ports, token_ids, slots, seconds), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ports.get()}"
    finally:
        process.kill()
        process.join()
