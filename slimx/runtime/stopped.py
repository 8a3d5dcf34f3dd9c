"""Finds processes of a tree that are stopped, as by SIGSTOP: they never answer, and nothing says so to those that wait.

A busy process is in another state, however long it is silent, and so is one that a debugger or a profiler holds.
"""

from __future__ import annotations

from collections import Counter

import psutil

LOOKS = 3
"""Looks in a row that find a process stopped, after which it counts as lost."""


class StopWatch:
    """Looks at the descendants of a guard, and at its owner if that is a worker of Ray."""

    def __init__(self, guard: int, owner: int):
        self._guard, self._owner = psutil.Process(guard), owner
        self._looks: Counter[psutil.Process] = Counter()

    def look(self) -> list[psutil.Process]:
        """Returns the processes that the last LOOKS looks found stopped.

        Looks are counted and not seconds: a guard that was stopped with all others has not looked meanwhile.
        """
        stopped = [process for process in self._watched() if _state(process) == psutil.STATUS_STOPPED]
        self._looks = Counter({process: self._looks[process] + 1 for process in stopped})
        return [process for process in stopped if self._looks[process] >= LOOKS]

    def _watched(self) -> list[psutil.Process]:
        watched = self._guard.children(recursive=True)
        try:
            raylet = psutil.Process(self._owner).parent()
            # Nothing starts another owner again, such as the driver; and with its raylet a whole run is stopped.
            if raylet is not None and raylet.name() == "raylet" and _state(raylet) != psutil.STATUS_STOPPED:
                watched.append(psutil.Process(self._owner))
        except psutil.NoSuchProcess:
            pass
        return watched


def _state(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
