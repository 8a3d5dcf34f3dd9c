"""Bounds the requests to engines that are in flight, for all rollouts together: a tool call holds no engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.client.stream import TokenStream
from slimx.rollout.hooks import Generator
from slimx.runtime.clocks import Clock


class Slots:
    """A number of requests that may be in flight at once; the others wait in the order in which they came, those of an
    evaluation before all others: trainers wait for it, while other rollouts are generated ahead.

    Not asyncio's semaphore: that looks at all who wait each time a place is left (Python 3.11), and thousands may."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._first: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def one(self, clock: Clock | None = None, *, first: bool = False) -> AsyncIterator[None]:
        """Hold a place; `clock` stands still while it is waited for. `first`: before those that are not."""
        if self._free:  # then nobody waits: a place that is left goes to whoever does
            self._free -= 1
        else:
            with clock.standing() if clock is not None else nullcontext():
                await self._turn(self._first if first else self._others)
        try:
            yield
        finally:
            self._release()

    async def _turn(self, queue: deque[asyncio.Future[None]]) -> None:
        """Wait in `queue` for a place that another leaves."""
        place = asyncio.get_running_loop().create_future()
        queue.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was given, too late
                self._release()
            raise

    def _release(self) -> None:
        for queue in (self._first, self._others):
            while queue:
                if not (place := queue.popleft()).done():
                    place.set_result(None)
                    return
        self._free += 1


class SlottedClient:
    """The client of one rollout of an evaluation: each of its requests takes a place, before those of training."""

    def __init__(self, client: Generator, slots: Slots, clock: Clock) -> None:
        self._client, self._slots, self._clock = client, slots, clock

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample as `GenerationClient.generate` does."""
        async with self._slots.one(self._clock, first=True):
            return await self._client.generate(request)

    @asynccontextmanager
    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenStream]:
        """Stream as `GenerationClient.stream` does; the place is held until the stream is left."""
        async with self._slots.one(self._clock, first=True), self._client.stream(request) as stream:
            yield stream
