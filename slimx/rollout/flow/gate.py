"""The gate between rollouts and engines, closed while engines must be idle and while a checkpoint saves open
requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from slimx.errors import SlimxError
from slimx.runtime.tasks import AnyFuture

ABORT_INTERVAL_S = 0.2
"""Interval in seconds at which the abort call is repeated, because each call misses requests that are still on their
way to an engine."""

CANCEL_S = 10.0
"""Number of seconds to wait for cancelled requests to end; after that, the gate ignores them."""


class Gate:
    """Gate between rollouts and engines: passes requests or holds them back, and tracks those in flight."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._out: set[AnyFuture] = set()
        self._abandoned: set[AnyFuture] = set()
        """Subset of `_out`: requests that were cancelled because they did not return, and that `close` no longer
        awaits."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    @property
    def out(self) -> int:
        """Number of requests in flight, whether they wait for a slot or are at an engine."""
        return len(self._out)

    def open(self) -> None:
        self._opened.set()

    async def opened(self) -> None:
        await self._opened.wait()

    async def close(self, abort: Callable[[], Awaitable[None]], deadline_s: float) -> None:
        """Holds back new requests, makes the engines end those in flight by calling `abort`, and waits for them.

        Cancels the requests that have not returned after `deadline_s` seconds, and stops waiting for them.
        """
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
            # The client handles lost engines: their requests wait for another engine, or are abandoned here.
            with suppress(SlimxError, TimeoutError):
                async with asyncio.timeout_at(end):
                    await abort()
            await asyncio.wait(waiting, timeout=ABORT_INTERVAL_S)

    @asynccontextmanager
    async def tracked(self, request: AnyFuture) -> AsyncIterator[None]:
        """Counts `request` as in flight inside the block, and cancels it at the end of the block if it is not done."""
        self._out.add(request)
        try:
            yield
        finally:
            if not request.done():
                request.cancel()
                await asyncio.wait({request}, timeout=CANCEL_S)
            if request.done():
                request.cancelled() or request.exception()  # marks the exception as retrieved
            self._out.discard(request)
            self._abandoned.discard(request)
