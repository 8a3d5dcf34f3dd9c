"""Signals of a driver, received in a thread: the main thread may be in a call that does not return."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

TWICE_S = 1.0
"""Seconds within which a repeated signal counts as the same: if it is sent to all processes of a job, it also arrives
through the driver's parent."""
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Handled signals."""

type Handler = Callable[[int, FrameType | None], object] | int | None
"""Handler of a signal, as `signal.getsignal` returns it."""


class Signals:
    """Passes signals of HEARD to subscribers, in a thread, while it is entered; they have no other effect. Ignored
    signals stay ignored: with nohup a run outlives its terminal.

    Python runs its handlers in the main thread between two instructions, so not while that thread waits in a library;
    the interpreter's C handler writes to a pipe at once."""

    def __init__(self) -> None:
        self._heard: list[int] = []
        self._subscribers: list[Callable[[int], None]] = []
        self._lock = threading.Lock()
        self._previous: dict[signal.Signals, Handler] = {}

    @property
    def received(self) -> list[int]:
        """Signals so far that request the end: all but SIGUSR1."""
        return [signum for signum in self._heard if signum != signal.SIGUSR1]

    def subscribe(self, callback: Callable[[int], None]) -> None:
        """Calls `callback` with every signal from now on and with earlier ones; in another thread."""
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
        """Installs the handlers; call it again after a library has installed its own."""
        for signum in self._previous:
            signal.signal(signum, _nothing)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        os.close(self._write)  # which ends the thread

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
