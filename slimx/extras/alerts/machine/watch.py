"""Looks at the driver's machine every half minute, in a thread, because a network disk may not answer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from slimx.extras.alerts.finding import Finding, Gate
from slimx.extras.alerts.machine.disks import Disk, disks_of
from slimx.extras.alerts.machine.gpus import Gpu, gpus_here, look_at

EVERY_S = 30.0
"""Seconds between two looks."""
OPENS = {"disk": 2, "gpu": 4}
"""Number of consecutive bad findings that open an alert, by its name."""
CLOSES = {"disk": 2, "gpu": 10}
"""Number of consecutive good findings that close an alert, by its name."""


class Machine:
    """Disks and GPUs of this machine, and the state of their alerts."""

    def __init__(self, disks: Iterable[Disk], gpus: list[Gpu], off: Collection[str] = ()) -> None:
        """Stores what to look at; does not look yet. `off`: names of alerts that are never opened."""
        self._disks: list[Disk] = []
        self._gpus: list[Gpu] = []
        if "disk" not in off:
            self._disks += disks
        if "gpu" not in off:
            self._gpus += gpus
        self._gates: dict[tuple[str, str], Gate] = {}

    def look(self, now: float) -> Iterator[tuple[bool, Finding]]:
        """Yields a pair (True if it opens, the finding) for each alert that opens or closes at time `now`."""
        for finding in self._findings(now):
            key = finding.name, finding.about
            gate = self._gates.setdefault(key, Gate(OPENS[finding.name], CLOSES[finding.name]))
            if gate.passes(finding):
                yield gate.is_open, finding

    def _findings(self, now: float) -> Iterator[Finding]:
        for disk in self._disks:
            try:
                yield disk.look(now)
            except OSError:  # a directory that another process has removed
                continue
        yield from look_at(self._gpus)


class MachineWatch:
    """Daemon thread that looks at the machine. `changes` returns what it has found since the last call."""

    def __init__(self, machine: Callable[[], Machine], every_s: float = EVERY_S) -> None:
        """Starts the thread, which calls `machine` once and then looks at the result every `every_s` seconds."""
        self._machine = machine
        self._every_s = every_s
        self._found: queue.SimpleQueue[tuple[bool, Finding]] = queue.SimpleQueue()
        self._ends = threading.Event()
        threading.Thread(target=self._work, name="slimx-machine", daemon=True).start()

    def changes(self) -> Iterator[tuple[bool, Finding]]:
        while not self._found.empty():
            yield self._found.get()

    def close(self) -> None:
        """Ends the thread after its current look, without waiting for it."""
        self._ends.set()

    def _work(self) -> None:
        machine = self._machine()
        while not self._ends.wait(self._every_s):
            for change in machine.look(time.time()):
                self._found.put(change)


def this_machine(directory: Path, off: Collection[str]) -> Machine:
    """Returns the disks that the run in `directory` writes to and the GPUs of this machine."""
    gpus = []
    if "gpu" not in off:
        gpus = gpus_here()
    return Machine(disks_of(directory), gpus, off)
