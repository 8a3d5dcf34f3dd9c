"""Ends a process in which one C call keeps Python's lock for good (an expression of `re`, a power of huge numbers): no
thread of Python's, the pulse's included, runs any more, so timers of the kernel do it.

They count the processor's time that the process takes, which stands still while it is stopped.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from types import TracebackType

from slimx.errors import LOST

SIGNAL = signal.SIGRTMAX
"""The signal at which faulthandler writes all stacks, from C."""
SAY_S = 1.0
"""Seconds of the processor between the stacks and the end."""
SIGEV_SIGNAL, SIGEV_THREAD = 0, 2


class _Event(ctypes.Structure):
    """struct sigevent of Linux on 64 bits."""

    _fields_ = (
        ("value", ctypes.c_size_t),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * 40),
    )


class GilWatch:
    """While it is entered, the process writes its stacks to standard error and ends with 69 once it has taken
    `seconds` of the processor without a call of `put_off`."""

    def __init__(self, seconds: float):
        self._seconds, self._libc = seconds, ctypes.CDLL(None, use_errno=True)

    def __enter__(self) -> GilWatch:
        faulthandler.register(SIGNAL, file=2, all_threads=True)
        leave = ctypes.cast(self._libc._exit, ctypes.c_void_p)
        self._timers = [self._timer(_Event(0, SIGNAL, SIGEV_SIGNAL)), self._timer(_Event(LOST, 0, SIGEV_THREAD, leave))]
        self.put_off()
        return self

    def put_off(self, more: float = 0.0) -> None:
        """Begin to count anew; `more`: seconds of the processor beyond the usual ones."""
        for timer, seconds in zip(self._timers, (self._seconds + more, self._seconds + more + SAY_S), strict=True):
            # struct itimerspec: seconds and nanoseconds of the interval, and of the first time
            spec = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
            self._call("timer_settime", timer, 0, spec, None)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for timer in self._timers:
            self._call("timer_delete", timer)
        faulthandler.unregister(SIGNAL)

    def _timer(self, event: _Event) -> ctypes.c_void_p:
        timer = ctypes.c_void_p()
        self._call("timer_create", time.CLOCK_PROCESS_CPUTIME_ID, ctypes.byref(event), ctypes.byref(timer))
        return timer

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
