"""Bounds the number of requests in flight over all rollouts: a tool call occupies no engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.hooks import CompletionStream, Generator
from slimx.runtime.clocks import Clock


class Slots:
    """A limit of concurrent requests. Others wait in order of arrival, those of an evaluation first: trainers wait for
    it, while other rollouts are generated ahead.

    Not asyncio's semaphore, which scans all waiters at each release (Python 3.11): there may be thousands.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._first: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def one(self, clock: Clock | None = None, *, first: bool = False) -> AsyncIterator[None]:
        """Occupies a slot inside the block; `clock` is suspended while waiting for it. `first`: True to pass all
        waiters without it."""
        if self._free:  # then there are no waiters: a released slot goes to the next waiter
            self._free -= 1
        else:
            with clock.paused() if clock is not None else nullcontext():
                await self._turn(self._first if first else self._others)
        try:
            yield
        finally:
            self._release()

    async def _turn(self, queue: deque[asyncio.Future[None]]) -> None:
        """Waits in `queue` for a released slot."""
        slot = asyncio.get_running_loop().create_future()
        queue.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # it was released too late
                self._release()
            raise

    def _release(self) -> None:
        for queue in (self._first, self._others):
            while queue:
                slot = queue.popleft()
                if not slot.done():
                    slot.set_result(None)
                    return
        self._free += 1


class SlottedClient:
    """The client of one evaluation rollout: its requests take slots before those of training."""

    def __init__(self, client: Generator, slots: Slots, clock: Clock) -> None:
        self._client = client
        self._slots = slots
        self._clock = clock

    async def generate(self, request: GenerationRequest) -> Completion:
        """Samples like `GenerationClient.generate`."""
        async with self._slots.one(self._clock, first=True):
            return await self._client.generate(request)

    @asynccontextmanager
    async def stream(self, request: GenerationRequest) -> AsyncIterator[CompletionStream]:
        """Streams like `GenerationClient.stream`; the slot is occupied until the stream ends."""
        async with self._slots.one(self._clock, first=True), self._client.stream(request) as stream:
            yield stream
