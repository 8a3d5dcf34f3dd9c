"""Queue of calls that a background thread makes in order, so that a slow server does not block the run."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from slimx.errors import SlimxError, counted


class InOrder:
    """Queue of calls that a daemon thread makes in the order in which they were added. If a call raises an exception, a
    later `add` or `close` raises it again, which reports the failure to the caller."""

    def __init__(self, name: str, *, close_s: float = 60.0, max_waiting: int = 512) -> None:
        """Starts the thread. `name`: name of the tracker or webhook, for messages. `close_s`: timeout in seconds for
        `close`. `max_waiting`: maximum number of queued calls."""
        self.name = name
        self._close_s = close_s
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        self._raised: deque[Exception] = deque()
        self._thread = threading.Thread(target=self._work, name=f"slimx-{name}", daemon=True)
        self._thread.start()

    def add(self, call: Callable[[], None]) -> None:
        """Adds a call to the queue. If `max_waiting` calls are already waiting, discards the call and raises
        SlimxError."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise SlimxError(
                f"slimx discarded a call to {self.name} behind {counted(self.waiting, 'waiting call')}; check that the "
                f"server of {self.name} is running and responds quickly",
                code="track.late",
                about=self.name,
            ) from None
        if self._raised:
            raise self._raised.popleft()

    @property
    def waiting(self) -> int:
        """Number of queued calls that have not started."""
        return self._calls.qsize()

    def close(self, last: Callable[[], None]) -> None:
        """Waits up to `close_s` seconds in total for all added calls, and then `last`, to be made. Raises SlimxError
        with the number of calls that remain after this time."""
        until = time.monotonic() + self._close_s
        ends = 0
        for call in (last, None):
            with suppress(queue.Full):
                self._calls.put(call, timeout=max(0.0, until - time.monotonic()))
                ends += 1
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            raise SlimxError(
                f"{self.name} did not finish all calls within {self._close_s:g} seconds, so slimx discarded the last "
                f"{self._calls.unfinished_tasks - ends}; check that the server of {self.name} is "
                "running and responds quickly",
                code="track.late",
                about=self.name,
            )
        if self._raised:
            raise self._raised.popleft()

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                self._calls.task_done()
                return
            try:
                call()
            except Exception as error:
                self._raised.append(error)
            finally:
                self._calls.task_done()
