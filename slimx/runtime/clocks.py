"""Clocks that pause: a rollout's deadline while its requests are queued, and a process's clock while the process is
stopped (SIGSTOP) or its machine suspended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

TICK_S = 0.5
"""Seconds between two readings by the clock's thread."""
STALL_S = 3.0
"""Seconds without a reading after which the process is assumed to have been stopped."""


class Clock:
    """Deadline of one rollout, paused while one of its requests is queued behind other requests.

    `async with` starts and ends it, and raises TimeoutError when it has passed.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = asyncio.timeout(None)
        self._waiting = 0
        self._left = 0.0
        """Seconds that remained when the clock was paused."""
        self._running = False

    @property
    def expired(self) -> bool:
        return self._deadline.expired()

    async def __aenter__(self) -> Clock:
        await self._deadline.__aenter__()
        # Starts only now: the rollout may have waited for a slot, which does not count.
        self._deadline.reschedule(asyncio.get_running_loop().time() + self._seconds)
        self._running = True
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._running = False
        await self._deadline.__aexit__(kind, error, trace)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the clock within the block. Tasks left over by a hook may outlive the clock."""
        due = self._deadline.when()
        if self._waiting == 0 and self._movable and due is not None:
            self._left = due - asyncio.get_running_loop().time()
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
    """Monotonic clock that skips the time during which the process did not run."""

    def __init__(self, source: Callable[[], float] = time.monotonic):
        self.lost = 0.0
        """Seconds skipped so far."""
        self._source = source
        self._last = source()
        self._lock = threading.Lock()

    def time(self) -> float:
        """Returns the current time in seconds. The first reading after a stall detects it."""
        with self._lock:
            now = self._source()
            if now - self._last > STALL_S:
                self.lost += now - self._last - TICK_S
            self._last = now
            return now - self.lost

    def keep(self) -> None:
        """Starts a daemon thread that reads the clock regularly."""
        threading.Thread(target=self._tick, name="slimx clock", daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.time()


class RunningLoop(asyncio.SelectorEventLoop):
    """Event loop whose timers and deadlines follow a RunningClock."""

    def __init__(self, clock: RunningClock):
        self._running_clock = clock
        super().__init__()

    def time(self) -> float:
        """Returns the clock's time in seconds."""
        return self._running_clock.time()
