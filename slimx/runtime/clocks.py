"""Clocks that can pause: a rollout's deadline while its requests are queued, and a process's clock while the process is
stopped (SIGSTOP) or its machine is suspended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

TICK_S = 0.5
"""Seconds between two readings of a RunningClock by its thread."""
STALL_S = 3.0
"""Time between two readings, in seconds, above which the process is assumed to have been stopped."""


class Clock:
    """Deadline for one rollout, which is paused while any of the rollout's requests is queued behind other requests.

    An async context manager: the deadline counts down while the block runs, and the block is cancelled with
    TimeoutError when no time is left.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        """Seconds that remained when the clock was last started or paused."""
        self._deadline = asyncio.timeout(None)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = 0
        self._running = False

    @property
    def expired(self) -> bool:
        return self._deadline.expired()

    async def __aenter__(self) -> Clock:
        await self._deadline.__aenter__()
        # The time starts here, because a rollout may have waited for a free slot before.
        self._running = True
        self._start()
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
        await self._deadline.__aexit__(kind, error, trace)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the clock within the block; blocks may be nested or concurrent. Has no effect once the block of the
        clock itself has ended, because background tasks of a hook may still run then."""
        if self._waiting == 0 and self._running:
            self._left = self._due - asyncio.get_running_loop().time()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0 and self._running:
                self._start()

    def _start(self) -> None:
        """Lets the remaining time run from now on. A pause does not move the timer, because most clocks end long before
        it rings; it is set again if it rings too early."""
        self._due = asyncio.get_running_loop().time() + self._left
        if self._timer is None:
            self._ring()

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if self._waiting or not self._running or self.expired:
            return
        if loop.time() < self._due:
            self._timer = loop.call_at(self._due, self._ring)
        else:
            self._deadline.reschedule(self._due)


class RunningClock:
    """Monotonic clock that does not count time during which the process did not run."""

    def __init__(self, source: Callable[[], float] = time.monotonic):
        self.lost = 0.0
        """Seconds that the clock has not counted so far, because the process was stopped."""
        self._source = source
        self._last = source()
        self._lock = threading.Lock()

    def time(self) -> float:
        """Returns the current time in seconds. The first call after the process was stopped detects the gap and
        excludes it from the returned time."""
        with self._lock:
            now = self._source()
            if now - self._last > STALL_S:
                self.lost += now - self._last - TICK_S
            self._last = now
            return now - self.lost

    def keep(self) -> None:
        """Starts a daemon thread that reads the clock every `TICK_S` seconds, so that stalls are detected."""
        threading.Thread(target=self._tick, name="slimx clock", daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.time()


class RunningLoop(asyncio.SelectorEventLoop):
    """Event loop whose timers and deadlines follow a RunningClock, so that they do not expire because the process was
    stopped."""

    def __init__(self, clock: RunningClock):
        self._running_clock = clock
        super().__init__()

    def time(self) -> float:
        """Returns the current time of the RunningClock in seconds."""
        return self._running_clock.time()
