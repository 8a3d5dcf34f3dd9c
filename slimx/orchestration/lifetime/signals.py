"""Signals of a driver, heard by a thread: the main thread may be in a call that does not return."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

TWICE_S = 1.0
"""Seconds within which the same signal again is the same one: sent to all processes of a job, it comes from the
launcher and by way of the driver's parent."""
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Signals:
    """While it is entered, the signals of HEARD do nothing but tell the subscribers, in a thread of its own. One that
    is ignored stays so: nohup has a run outlive its terminal.

    Python's own handlers run in the main thread between two of its instructions, so not while that waits in a library;
    what the interpreter's C handler writes into a pipe is there at once."""

    def __init__(self) -> None:
        self._heard: list[int] = []
        self._told: list[Callable[[int], None]] = []
        self._lock = threading.Lock()
        self._before: dict[int, Any] = {}

    @property
    def received(self) -> list[int]:
        """Signals to end so far: all but SIGUSR1."""
        return [signum for signum in self._heard if signum != signal.SIGUSR1]

    def subscribe(self, tell: Callable[[int], None]) -> None:
        """Call `tell` with every signal from now on, and with those that have come already; from another thread."""
        with self._lock:
            self._told.append(tell)
            for signum in self._heard:
                tell(signum)

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        before = {signum: signal.getsignal(signum) for signum in HEARD}
        self._before = {signum: handler for signum, handler in before.items() if handler != signal.SIG_IGN}
        self.install()
        threading.Thread(target=self._listen, name="slimx signals", daemon=True).start()
        return self

    def install(self) -> None:
        """Handle the signals; again after a library has put its own handlers there."""
        for signum in self._before:
            signal.signal(signum, _nothing)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        os.close(self._write)  # which ends the thread

    def _listen(self) -> None:
        last = dict.fromkeys(HEARD, -math.inf)
        while data := os.read(self._read, 64):
            for signum in data:
                now = time.monotonic()
                if signum not in HEARD or now - last[signum] < TWICE_S:
                    continue
                last[signum] = now
                with self._lock:
                    self._heard.append(signum)
                    for tell in self._told:
                        tell(signum)
        os.close(self._read)


def _nothing(signum: int, frame: object) -> None: ...
