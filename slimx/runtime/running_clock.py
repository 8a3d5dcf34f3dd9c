"""A clock that stands still while this process does: deadlines survive a stop (SIGSTOP) and a suspended machine.

Whoever was waited for went on meanwhile, but its answer could not be taken: it is not late.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

TICK_S = 0.5
"""Seconds between two looks of the clock's own thread."""
STALL_S = 3.0
"""Seconds without a look that only a process without any running thread lets pass."""


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
