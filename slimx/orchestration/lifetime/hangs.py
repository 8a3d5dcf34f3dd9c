"""Hangs: stacks of parts that hang are written before these are ended; a process that should have ended is ended by a
watchdog, and one whose event loop stands still, with every deadline in it, by its pulse.

event loop       beat   beat   a hook blocks ........................................
pulse's thread   look   look   look   look  ...  deadline: stacks, place, exit status
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
"""Seconds for all stacks; the end of a run does not wait longer for them."""

SILENT = ("rank.silent", "engine.silent", "engine.useless")
"""Codes of errors of parts that did not answer, or not with what they were asked for."""

OWN = str(Path(__file__).parents[2])
SAY_S = 10.0
"""Seconds that the sentence of a watchdog gets."""

LOOK_S = 0.5
"""Seconds between two looks at the event loop."""
STRIKE_S = 60.0
"""CPU seconds that a loop which computes may take while the pulse's thread writes stacks and the sentence."""
SIGNAL = signal.SIGRTMAX
"""The signal at which faulthandler writes all stacks, from C."""
STACKS_S = 1.0
"""Seconds of the processor between these stacks and the end."""
SIGEV_SIGNAL, SIGEV_THREAD = 0, 2


def hangs(error: BaseException) -> bool:
    """True for an error that says who was waited for in vain."""
    return isinstance(error, DeadlineError) or (isinstance(error, SlimxError) and error.code in SILENT)


async def keep_stacks(directory: Path, note: Callable[[str], None], error: BaseException) -> None:
    """Write the stacks of this machine's processes to RUN/stacks if `error` is that somebody hangs; does not raise."""
    if not hangs(error):
        return
    try:
        async with asyncio.timeout(WRITE_S):
            file = await in_thread(write_stacks, directory, str(error).partition("\n")[0])
    except (OSError, TimeoutError) as problem:
        note(f"the stacks of the processes were not written ({type(problem).__name__}: {problem})")
    else:
        note(f"the stacks of this machine's processes are in {file}")


class Watchdog:
    """Armed when the end begins; ends the process if it has not come in time. `with` disarms it.

    A call into Ray's library may block for ever while a process of Ray's is stopped, a hook may keep a thread or a task
    from ending. The watchdog is a thread: it needs no event loop and no cooperation of what hangs."""

    def __init__(self, leave: Callable[[int], None] = os._exit):
        """`leave` ends the process with a status."""
        self._leave = leave
        self._changed = threading.Condition()
        self._armed = False

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.disarm()

    def arm(self, seconds: float, status: int, why: str | None) -> None:
        """From now on the process has `seconds` to end; then it ends with `status`, and one sentence says `why` and
        what it waited for (None: all is said). Armed already: nothing changes."""
        with self._changed:
            if self._armed:
                return
            self._armed = True
        threading.Thread(target=self._watch, args=(seconds, status, why), name="slimx watchdog", daemon=True).start()

    def disarm(self) -> None:
        """The end has come, or another way is tried."""
        with self._changed:
            self._armed = False
            self._changed.notify_all()

    def _watch(self, seconds: float, status: int, why: str | None) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: not self._armed, timeout=seconds):
                return
        if why is not None:
            sentence = why.partition("\n")[0]
            waited = f"; after {seconds:g} s {main_place()} has not returned, so the process ends" if seconds else ""
            said = one_line(sentence + waited)
            # Whoever reads it may be what hangs.
            saying = threading.Thread(target=print, args=(f"slimx: {said}",), kwargs={"file": sys.stderr}, daemon=True)
            saying.start()
            saying.join(SAY_S)
        self._leave(status)


def main_place() -> str:
    """Returns where the main thread is: the innermost line of a user's code that slimx has called; else of slimx, or of
    anything where there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    inside = list(dropwhile(lambda entry: not entry.filename.startswith(OWN), stack))
    ours = [entry for entry in inside if entry.filename.startswith(OWN)]
    places = [entry for entry in inside if of_users(entry.filename)] or ours or list(stack)
    return f"{places[-1].name} ({places[-1].filename}, line {places[-1].lineno})" if places else "an exit function"


def pulse_deadline(config: Config) -> float:
    """Returns the seconds that the driver's event loop may stand still: all that it then runs is late, or as long as a
    rank may be silent, whichever is longer."""
    rollouts = min(config.rollout.rollout_deadline, config.schedule.step_deadline)
    return max(rollouts, config.trainer.watch_deadline)


class Pulse:
    """While it is entered, in the loop, a thread looks whether the loop goes on. Time in which the process or the
    thread did not run (SIGSTOP, a collection of garbage) does not count: see RunningClock."""

    def __init__(self, deadline_s: float, strike: Callable[[DeadlineError], None], time: Callable[[], float]):
        """`strike` is called in the thread, once, if the loop stands still for `deadline_s` seconds of `time`."""
        self._deadline_s, self._strike, self._time = deadline_s, strike, time
        self._over = threading.Event()
        self._gil = GilWatch(deadline_s)

    def __enter__(self) -> Pulse:
        loop = asyncio.get_running_loop()
        self._gil.__enter__()  # here: a hook that keeps Python's lock from now on would keep it from the thread
        self._thread = threading.Thread(target=self._watch, args=(loop,), name="slimx pulse", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._gil.__exit__(kind, error, trace)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._over.is_set():
            beat, began = threading.Event(), self._time()
            try:
                loop.call_soon_threadsafe(beat.set)
            except RuntimeError:  # the loop has closed
                return
            while not beat.is_set() and not self._over.is_set() and self._time() - began < self._deadline_s:
                self._over.wait(LOOK_S)
                self._gil.put_off()
            if not beat.is_set() and not self._over.is_set():
                place = f"{main_place()}, which blocks it; await there, or call it by asyncio.to_thread"
                self._gil.put_off(STRIKE_S)
                self._strike(DeadlineError("the driver's event loop", self._deadline_s, place))
                return


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
    `seconds` of the processor without a call of `put_off`.

    One C call may keep Python's lock for good (an expression of `re`, a power of huge numbers): then no thread runs,
    that of the pulse included. Timers of the kernel do; they count the processor's time of the process, which stands
    still while it is stopped.
    """

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
        for timer, seconds in zip(self._timers, (self._seconds + more, self._seconds + more + STACKS_S), strict=True):
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
