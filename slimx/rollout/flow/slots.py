"""Limits the number of requests in flight over all rollouts; a rollout that waits for a tool occupies no slot."""

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
    """A limit on concurrent requests. Further requests wait in order of arrival, those of an evaluation before those of
    training, because trainers wait for an evaluation, while training rollouts are generated ahead.

    Replaces asyncio's semaphore, which scans all waiters at each release (Python 3.11); there may be thousands of
    waiters.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._first: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def occupy(self, clock: Clock | None = None, *, first: bool = False) -> AsyncIterator[None]:
        """Occupies a slot inside the block. `clock`: clock of the rollout's deadline, which is suspended during the
        wait for the slot.

        `first`: True to wait ahead of all requests that were made with `first=False`.
        """
        if self._free:  # a free slot means that there is no waiter, because a released slot goes to the next waiter
            self._free -= 1
        else:
            with clock.paused() if clock is not None else nullcontext():
                await self._turn(self._first if first else self._others)
        try:
            yield
        finally:
            self._release()

    async def _turn(self, queue: deque[asyncio.Future[None]]) -> None:
        """Waits in `queue` until a slot is released to this waiter."""
        slot = asyncio.get_running_loop().create_future()
        queue.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # the slot was released to this waiter just before the cancellation
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
    """Client of one evaluation rollout: its requests get slots before those of training rollouts."""

    def __init__(self, client: Generator, slots: Slots, clock: Clock) -> None:
        self._client = client
        self._slots = slots
        self._clock = clock

    async def generate(self, request: GenerationRequest) -> Completion:
        """Samples like `GenerationClient.generate`, in a slot."""
        async with self._slots.occupy(self._clock, first=True):
            return await self._client.generate(request)

    @asynccontextmanager
    async def stream(self, request: GenerationRequest) -> AsyncIterator[CompletionStream]:
        """Streams like `GenerationClient.stream`, in a slot that is occupied until the stream ends."""
        async with self._slots.occupy(self._clock, first=True), self._client.stream(request) as stream:
            yield stream
