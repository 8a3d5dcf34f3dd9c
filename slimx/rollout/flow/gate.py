"""The gate between rollouts and engines: closed while these rest, and while a run saves what is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from slimx.errors import SlimxError

ASK_AGAIN_S = 0.2
"""Seconds after which engines are told to abort once more: a request may have been on its way to them."""

CANCEL_S = 10.0
"""Seconds that cancelled requests get to end; one that will not is left to itself."""


class Gate:
    """Lets requests of rollouts out to the engines, or holds them, and knows which are out."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._out: set[asyncio.Future[Any]] = set()
        self._given_up: set[asyncio.Future[Any]] = set()
        """Requests of `_out` that were cancelled because they did not come back; nobody waits for it again."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    @property
    def out(self) -> int:
        """Requests that wait for a place or are with an engine."""
        return len(self._out)

    def open(self) -> None:
        self._opened.set()

    async def opened(self) -> None:
        await self._opened.wait()

    async def close(self, abort: Callable[[], Awaitable[None]], deadline_s: float) -> None:
        """Let nothing out, have engines end by `abort` what is out, and wait for it. What has not come back after
        `deadline_s` seconds is given up: it is cancelled, and nobody waits for it again."""
        self._opened.clear()
        end = asyncio.get_running_loop().time() + deadline_s
        while waiting := self._out - self._given_up:
            if asyncio.get_running_loop().time() >= end:
                self._given_up |= waiting
                for request in waiting:
                    request.cancel()
                await asyncio.wait(waiting, timeout=CANCEL_S)
                return
            # A lost engine is another's business: its requests wait for the next one, or are given up here.
            with suppress(SlimxError, TimeoutError):
                async with asyncio.timeout_at(end):
                    await abort()
            await asyncio.wait(waiting, timeout=ASK_AGAIN_S)

    @asynccontextmanager
    async def tracked(self, request: asyncio.Future[Any]) -> AsyncIterator[None]:
        """Counts `request` as in flight inside the block; it may be cancelled."""
        self._out.add(request)
        try:
            yield
        finally:
            if not request.done():
                request.cancel()
                await asyncio.wait({request}, timeout=CANCEL_S)
            if request.done():
                request.cancelled() or request.exception()  # looked at, whoever else still does
            self._out.discard(request)
            self._given_up.discard(request)
