"""The gate between rollouts and engines: closed while engines are idle, and while a run saves pending requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from slimx.errors import SlimxError
from slimx.runtime.tasks import AnyFuture

ASK_AGAIN_S = 0.2
"""Interval of repeated abort calls, in seconds: a request may have been on its way to an engine."""

CANCEL_S = 10.0
"""Time for cancelled requests to end, in seconds; others are abandoned."""


class Gate:
    """Lets requests of rollouts pass to the engines or holds them back, and tracks those in flight."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._out: set[AnyFuture] = set()
        self._abandoned: set[AnyFuture] = set()
        """Abandoned requests of `_out`: cancelled because they did not return."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    @property
    def out(self) -> int:
        """Number of requests that wait for a slot or are at an engine."""
        return len(self._out)

    def open(self) -> None:
        self._opened.set()

    async def opened(self) -> None:
        await self._opened.wait()

    async def close(self, abort: Callable[[], Awaitable[None]], deadline_s: float) -> None:
        """Holds back new requests, ends those in flight by `abort`, and waits for them. Requests that have not returned
        after `deadline_s` seconds are cancelled and abandoned."""
        self._opened.clear()
        end = asyncio.get_running_loop().time() + deadline_s
        while True:
            waiting = self._out - self._abandoned
            if not waiting:
                return
            if asyncio.get_running_loop().time() >= end:
                self._abandoned |= waiting
                for request in waiting:
                    request.cancel()
                await asyncio.wait(waiting, timeout=CANCEL_S)
                return
            # Lost engines are handled elsewhere: their requests wait for another engine or are abandoned here.
            with suppress(SlimxError, TimeoutError):
                async with asyncio.timeout_at(end):
                    await abort()
            await asyncio.wait(waiting, timeout=ASK_AGAIN_S)

    @asynccontextmanager
    async def tracked(self, request: AnyFuture) -> AsyncIterator[None]:
        """Counts `request` as in flight inside the block; it may be cancelled."""
        self._out.add(request)
        try:
            yield
        finally:
            if not request.done():
                request.cancel()
                await asyncio.wait({request}, timeout=CANCEL_S)
            if request.done():
                request.cancelled() or request.exception()  # marked as retrieved
            self._out.discard(request)
            self._abandoned.discard(request)
