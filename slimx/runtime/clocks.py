"""Clocks that stand still: a rollout's deadline while a request of it waits for others, and that of a process while it
is stopped (SIGSTOP) or its machine is suspended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

TICK_S = 0.5
"""Seconds between two looks of the clock's own thread."""
STALL_S = 3.0
"""Seconds without a look that only a process without any running thread lets pass."""


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


class RunningClock:
    """Seconds of the monotonic clock, without those in which the process did not run."""

    def __init__(self, source: Callable[[], float] = time.monotonic):
        self.lost = 0.0
        """Seconds that were left out so far."""
        self._source, self._last = source, source()
        self._lock = threading.Lock()

    def time(self) -> float:
        """The time now. Whoever asks first after a stall finds it out."""
        with self._lock:
            now = self._source()
            if now - self._last > STALL_S:
                self.lost += now - self._last - TICK_S
            self._last = now
            return now - self.lost

    def keep(self) -> None:
        """Look at the clock in a thread of its own from now on, as long as the process lives."""
        threading.Thread(target=self._tick, name="slimx clock", daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.time()


class RunningLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers and deadlines go by a RunningClock."""

    def __init__(self, clock: RunningClock):
        self._running_clock = clock
        super().__init__()

    def time(self) -> float:
        """Seconds of the clock."""
        return self._running_clock.time()
