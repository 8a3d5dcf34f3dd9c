"""Detection of hangs in the driver: the stacks of hanging processes are written before the processes are killed. A
`Watchdog` kills a process that does not exit in time. A `Pulse` kills a process whose event loop is blocked, because
deadlines that the loop itself measures cannot expire then.

event loop       beat   beat   a hook blocks ........................................
pulse's thread   check  check  check  check ...  deadline: writes stacks and location, exits with a status
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path
from types import TracebackType

from slimx.config.schema import Config
from slimx.errors import LOST, DeadlineError, SlimxError, of_users
from slimx.observability.live.safe_text import one_line
from slimx.observability.live.stacks import write_stacks
from slimx.runtime.tasks import in_thread

WRITE_S = 45.0
"""Maximum number of seconds that a stopping run waits for the stacks of all processes to be written."""

SILENT = ("rank.silent", "engine.silent", "engine.useless")
"""Codes of the errors which report that a rank or engine did not respond in time, or responded without doing its
work."""

PACKAGE = str(Path(__file__).parents[2])
SAY_S = 10.0
"""Maximum number of seconds that the watchdog waits for its message to be printed before it kills the process."""

LOOK_S = 0.5
"""Interval between two checks of the event loop, in seconds."""
STRIKE_S = 60.0
"""CPU seconds added to the countdown of `GilWatch` while the thread of `Pulse` writes the stacks and the message,
because the blocked event loop may use CPU time in the meantime."""
SIGNAL = signal.SIGRTMAX
"""Signal on which faulthandler writes the stacks of all threads. Its handler is C code that does not need the GIL."""
STACKS_S = 1.0
"""CPU seconds that the process has for writing the stacks of all threads before `GilWatch` ends it."""
SIGEV_SIGNAL = 0
SIGEV_THREAD = 2


def hangs(error: BaseException) -> bool:
    """Returns True if `error` reports that a part of the run did not respond in time."""
    return isinstance(error, DeadlineError) or (isinstance(error, SlimxError) and error.code in SILENT)


async def keep_stacks(directory: Path, note: Callable[[str], None], error: BaseException) -> None:
    """Writes the stacks of this machine's processes to RUN/stacks if `error` reports a hang, and calls `note` with the
    file's path, or with the reason why it could not be written. Does not raise."""
    if not hangs(error):
        return
    try:
        async with asyncio.timeout(WRITE_S):
            file = await in_thread(write_stacks, directory, str(error).partition("\n")[0])
    except (OSError, TimeoutError) as problem:
        note(
            f"the stacks of this machine's processes could not be written to {directory / 'stacks'} "
            f"({type(problem).__name__}: {problem})"
        )
    else:
        note(f"the stacks of this machine's processes are in {file}")


class Watchdog:
    """Kills the process if it has not exited when a deadline expires. `arm` starts the deadline; leaving the `with`
    block cancels the deadline. A call into Ray's library may block forever while one of Ray's processes is stopped, and
    a thread or task of a hook may never end. The watchdog runs in a thread, so it needs neither the event loop nor the
    cooperation of the hanging code."""

    def __init__(self, leave: Callable[[int], None] = os._exit):
        """Creates a watchdog without a deadline. `leave` ends the process with an exit status."""
        self._leave = leave
        self._changed = threading.Condition()
        self._armed = False

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.disarm()

    def arm(self, seconds: float, status: int, reason: str | None) -> None:
        """Starts a deadline of `seconds` seconds for the process to exit. When it expires, prints a message with
        `reason` and the call that has not returned (nothing if `reason` is None), and ends the process with exit status
        `status`. Has no effect if a deadline is running already."""
        with self._changed:
            if self._armed:
                return
            self._armed = True
        arguments = (seconds, status, reason)
        threading.Thread(target=self._watch, args=arguments, name="slimx watchdog", daemon=True).start()

    def disarm(self) -> None:
        """Cancels the deadline."""
        with self._changed:
            self._armed = False
            self._changed.notify_all()

    def _watch(self, seconds: float, status: int, reason: str | None) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: not self._armed, timeout=seconds):
                return
        if reason is not None:
            sentence = reason.partition("\n")[0]
            if seconds:
                sentence += f"; {main_location()} has not returned after {seconds:g} s, so the process is killed"
            text = f"slimx: {one_line(sentence)}"
            # Printing may also block if the reader of standard error hangs.
            printer = threading.Thread(target=print, args=(text,), kwargs={"file": sys.stderr}, daemon=True)
            printer.start()
            printer.join(SAY_S)
        self._leave(status)


def main_location() -> str:
    """Returns the location of the main thread, see `location_of`."""
    return location_of(threading.main_thread().ident or 0)


def location_of(thread: int) -> str:
    """Returns the function, file and line that the thread with the identifier `thread` is executing: the innermost
    frame of user code that slimx called if there is one, else the innermost frame of slimx, else the innermost frame of
    all."""
    frame = sys._current_frames().get(thread)
    stack = list(traceback.extract_stack(frame)) if frame is not None else []
    below_slimx = list(dropwhile(lambda entry: not entry.filename.startswith(PACKAGE), stack))
    in_user_code = []
    in_slimx = []
    for entry in below_slimx:
        if of_users(entry.filename):
            in_user_code.append(entry)
        if entry.filename.startswith(PACKAGE):
            in_slimx.append(entry)
    for entries in (in_user_code, in_slimx, stack):
        if entries:
            return f"{entries[-1].name} ({entries[-1].filename}, line {entries[-1].lineno})"
    return "an exit function"


def pulse_deadline(config: Config) -> float:
    """Returns the number of seconds for which the driver's event loop may be blocked: the rollout deadline or the step
    deadline, whichever is shorter, but at least `trainer.watch_deadline`, the time for which a rank may be silent."""
    rollouts = min(config.rollout.rollout_deadline, config.schedule.step_deadline)
    return max(rollouts, config.trainer.watch_deadline)


class Pulse:
    """Detects from a thread that an event loop is blocked; must be entered in that loop. Time during which the process
    or the thread did not run (SIGSTOP, garbage collection) does not count: see RunningClock."""

    def __init__(self, deadline_s: float, strike: Callable[[DeadlineError], None], time: Callable[[], float]):
        """Sets the deadline. `strike` is called once, in the pulse's thread, if the event loop is blocked for
        `deadline_s` seconds, measured by the clock `time`."""
        self._deadline_s = deadline_s
        self._strike = strike
        self._time = time
        self._over = threading.Event()
        self._gil = GilWatch(deadline_s)

    def __enter__(self) -> Pulse:
        loop = asyncio.get_running_loop()
        self._gil.__enter__()  # in this thread: a hook that holds the GIL could block the new one
        self._thread = threading.Thread(target=self._watch, args=(loop,), name="slimx pulse", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._gil.__exit__(kind, error, trace)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._over.is_set():
            beat = threading.Event()
            began = self._time()
            try:
                loop.call_soon_threadsafe(beat.set)
            except RuntimeError:  # the loop is closed
                return
            while not (beat.is_set() or self._over.is_set() or self._time() - began >= self._deadline_s):
                self._over.wait(LOOK_S)
                self._gil.put_off()
            if not beat.is_set() and not self._over.is_set():
                blocked_at = (
                    f"{main_location()}, which blocks it; make that call asynchronous or run it with asyncio.to_thread"
                )
                self._gil.put_off(STRIKE_S)
                self._strike(DeadlineError("the driver's event loop", self._deadline_s, blocked_at))
                return


class _SigEvent(ctypes.Structure):
    """The C structure `sigevent` of 64-bit Linux, an argument of timer_create."""

    _fields_ = (
        ("value", ctypes.c_size_t),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * 40),
    )


class GilWatch:
    """While entered, writes the stacks of the process to standard error and ends the process with status 69 when the
    process has used `seconds` of CPU time since the last call to `put_off`.

    A single C call, such as one that matches a regular expression or computes a power of huge numbers, may not release
    the GIL until it returns. Until then no Python thread runs, including the thread of `Pulse`. Kernel timers still
    expire; they measure the CPU time of the process, which does not advance while the process is stopped."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __enter__(self) -> GilWatch:
        faulthandler.register(SIGNAL, file=2, all_threads=True)
        leave = ctypes.cast(self._libc._exit, ctypes.c_void_p)
        stacks = self._timer(_SigEvent(0, SIGNAL, SIGEV_SIGNAL))
        end = self._timer(_SigEvent(LOST, 0, SIGEV_THREAD, leave))
        self._timers = [stacks, end]
        self.put_off()
        return self

    def put_off(self, more: float = 0.0) -> None:
        """Restarts the countdown, with `more` CPU seconds added to it."""
        for timer, seconds in zip(self._timers, (self._seconds + more, self._seconds + more + STACKS_S), strict=True):
            # struct itimerspec: seconds and nanoseconds of the repetition interval (none), then of the first expiration
            spec = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
            self._call("timer_settime", timer, 0, spec, None)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for timer in self._timers:
            self._call("timer_delete", timer)
        faulthandler.unregister(SIGNAL)

    def _timer(self, event: _SigEvent) -> ctypes.c_void_p:
        timer = ctypes.c_void_p()
        self._call("timer_create", time.CLOCK_PROCESS_CPUTIME_ID, ctypes.byref(event), ctypes.byref(timer))
        return timer

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
