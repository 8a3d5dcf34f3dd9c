"""Ends a process that should have ended: an orderly end can hang in a call that nothing interrupts.

A call into Ray's library may block for ever while a process of Ray's is stopped, a hook may keep a thread or a task
from ending. The watchdog is a thread: it needs no event loop and no cooperation of what hangs.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path
from types import TracebackType

from slimx.errors import of_users
from slimx.observability.live.safe_text import one_line

OWN = str(Path(__file__).parents[2])

SAY_S = 10.0
"""Seconds that the sentence gets."""


class Watchdog:
    """Armed when the end begins; ends the process if it has not come in time. `with` disarms it."""

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
