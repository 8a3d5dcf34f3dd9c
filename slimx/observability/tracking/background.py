"""A sink in a thread of its own: one that waits for a server does not hold up the run."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from slimx.errors import SlimxError
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.samples import RecordedSample
from slimx.observability.tracking.sinks import Sink


class InBackground:
    """Calls `sink` in the order of the calls, in a daemon thread.

    What a call raises is raised by a later one, so that whoever guards the sink counts it. Raises SlimxError for a call
    that finds `room` others waiting, and at `close` for those that have not been made after `close_s` seconds.
    """

    def __init__(self, sink: Sink, *, close_s: float = 60.0, room: int = 512) -> None:
        self.name = sink.name
        self._sink, self._close_s = sink, close_s
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(room)
        self._raised: deque[Exception] = deque()
        self._thread = threading.Thread(target=self._work, name=f"slimx-{sink.name}", daemon=True)
        self._thread.start()

    def log(self, record: StepRecord) -> None:
        self._add(partial(self._sink.log, record))

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        self._add(partial(self._sink.samples, step, list(samples)))

    def close(self) -> None:
        """Wait until the calls have been made, `close_s` seconds in all."""
        until, last = time.monotonic() + self._close_s, 0
        for call in (self._sink.close, None):
            with suppress(queue.Full):
                self._calls.put(call, timeout=max(0.0, until - time.monotonic()))
                last += 1
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            raise SlimxError(
                f"{self.name} did not take its last {self._calls.unfinished_tasks - last} calls in {self._close_s:g} "
                "seconds; they are left out",
                code="track.late",
                about=self.name,
            )
        if self._raised:
            raise self._raised.popleft()

    def _add(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise SlimxError(
                f"{self.name} does not keep up: {self._calls.qsize()} calls wait for it; this one is left out",
                code="track.late",
                about=self.name,
            ) from None
        if self._raised:
            raise self._raised.popleft()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                self._raised.append(error)
            finally:
                self._calls.task_done()
        self._calls.task_done()
