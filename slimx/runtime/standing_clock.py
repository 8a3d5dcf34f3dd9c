"""Deadlines that stand still while what they bound waits for something else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class Clock:
    """The deadline of one rollout, which stands still while one of its requests waits behind those of others.

    `async with` begins and ends it; TimeoutError leaves that when it has passed.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._deadline = seconds, asyncio.timeout(None)
        self._waiting = 0
        self._left = 0.0
        """Seconds that remained when the clock stopped."""
        self._running = False

    @property
    def expired(self) -> bool:
        return self._deadline.expired()

    async def __aenter__(self) -> Clock:
        await self._deadline.__aenter__()
        # From here on: a rollout may have waited for its place, which is no fault of its own.
        self._deadline.reschedule(asyncio.get_running_loop().time() + self._seconds)
        self._running = True
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._running = False
        await self._deadline.__aexit__(kind, error, trace)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """The clock stands still meanwhile. Tasks that a hook left behind may outlive the clock."""
        if self._waiting == 0 and self._movable:
            self._left = self._deadline.when() - asyncio.get_running_loop().time()
            self._deadline.reschedule(None)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0 and self._movable:
                self._deadline.reschedule(asyncio.get_running_loop().time() + self._left)

    @property
    def _movable(self) -> bool:
        return self._running and not self._deadline.expired()
