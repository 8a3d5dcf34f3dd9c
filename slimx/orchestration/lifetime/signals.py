"""Signals of a driver, received in a thread, because the main thread may be in a call that does not return."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

TWICE_S = 1.0
"""Seconds within which a repeated signal counts only once: a signal that is sent to all processes of a job also arrives
a second time, forwarded by the driver's parent process."""
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that the driver handles."""

type Handler = Callable[[int, FrameType | None], object] | int | None
"""Signal handler, of any type that `signal.getsignal` returns."""


class Signals:
    """While entered, passes the signals in `HEARD` to subscribers, which it calls in a separate thread; the signals
    have no other effect. A signal that was ignored before stays ignored, so a run started with nohup outlives its
    terminal.

    A Python signal handler would not do: it runs in the main thread between two bytecode instructions, and therefore
    not while that thread waits in a C library. The interpreter's C handler, in contrast, writes the signal to a pipe at
    once, and the thread of this class reads the pipe."""

    def __init__(self) -> None:
        self._heard: list[int] = []
        self._subscribers: list[Callable[[int], None]] = []
        self._lock = threading.Lock()
        self._previous: dict[signal.Signals, Handler] = {}

    @property
    def received(self) -> list[int]:
        """Signals received so far that ask the run to stop: all except SIGUSR1."""
        return [signum for signum in self._heard if signum != signal.SIGUSR1]

    def subscribe(self, callback: Callable[[int], None]) -> None:
        """Calls `callback` with every signal received so far, and from now on with each new signal, in the thread that
        receives signals."""
        with self._lock:
            self._subscribers.append(callback)
            for signum in self._heard:
                callback(signum)

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for signum in HEARD:
            handler = signal.getsignal(signum)
            if handler != signal.SIG_IGN:
                self._previous[signum] = handler
        self.install()
        threading.Thread(target=self._listen, name="slimx signals", daemon=True).start()
        return self

    def install(self) -> None:
        """Installs the handlers. Must be called again after a library has installed handlers."""
        for signum in self._previous:
            signal.signal(signum, _nothing)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        os.close(self._write)  # the thread reads end-of-file and ends

    def _listen(self) -> None:
        last: dict[int, float] = dict.fromkeys(HEARD, -math.inf)
        while data := os.read(self._read, 64):
            for signum in data:
                now = time.monotonic()
                if signum not in HEARD or now - last[signum] < TWICE_S:
                    continue
                last[signum] = now
                with self._lock:
                    self._heard.append(signum)
                    for callback in self._subscribers:
                        callback(signum)
        os.close(self._read)


def _nothing(signum: int, frame: object) -> None: ...
