"""Ends a run whose event loop stands still: a hook that blocks the loop stops every deadline with it.

event loop       beat   beat   a hook blocks ........................................
pulse's thread   look   look   look   look  ...  deadline: stacks, place, exit status
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType

from slimx.config.schema import Config
from slimx.errors import DeadlineError
from slimx.orchestration.lifetime.gil_watch import GilWatch
from slimx.orchestration.lifetime.watchdog import main_place

LOOK_S = 0.5
"""Seconds between two looks of the thread."""
STRIKE_S = 60.0
"""CPU seconds that a loop which computes may take while the thread writes stacks and the sentence."""


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
