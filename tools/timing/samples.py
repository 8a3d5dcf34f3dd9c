"""CPU time of a process and of all that it starts, looked at a few times a second."""

from __future__ import annotations

import ctypes
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from slimx.runtime.user_files import private_directory
from tests.warm.interpreter import PREFIX, TEST, variables_of

FORKED = 0
"""In place of the worker of a program that tests.warm has forked, and of what it starts: their test is known."""
TICK = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36
PERIOD = 0.2
"""Seconds between two looks. A process that lives shorter may be missed: a few percent of a session of tests."""


@dataclass(slots=True)
class Process:
    """A process that was seen, named by its id and start."""

    pid: int
    command: str
    worker: int
    """Process id of the pytest process that it belongs to; its own for that process."""
    test: str = ""
    """Test that ran when it was started, as pytest's variable in its environment has it."""
    seconds: float = 0.0
    """CPU time until the last look."""
    parts: list[tuple[float, float]] = field(default_factory=list)
    """Time of a look, and CPU seconds since the look before."""


class Samples:
    """Looks at all processes below this one."""

    def __init__(self) -> None:
        # Processes that lose their parent become children of this one, so that none is missed.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.processes: dict[tuple[int, int], Process] = {}

    def look(self, keep: int) -> None:
        """Adds the CPU time of each process since the look before, and collects ended children but `keep`: a test that
        looks for an orphan's end waits for that."""
        now = time.time()
        stats = _stats()
        children = defaultdict(list)
        for pid, (parent, _, _) in stats.items():
            children[parent].append(pid)
        for pid in children[os.getpid()]:
            if pid != keep:
                os.waitpid(pid, os.WNOHANG)
        forked = _forked_tests()
        waiting = [(pid, 0, "") for pid in children[os.getpid()]]
        while waiting:
            pid, worker, above = waiting.pop()
            _, started, seconds = stats[pid]
            process = self.processes.get((pid, started))
            if process is None:
                # A fork shows the variables of the process that it was forked from, in whichever worker that began.
                test = forked.get(pid) or above
                belongs = (FORKED, test) if test else (worker or pid, _test(pid))
                process = self.processes[pid, started] = Process(pid, _command(pid), *belongs)
            elif not process.command or " " not in process.command:
                process.command = _command(pid) or process.command
            if seconds > process.seconds:
                process.parts.append((now, seconds - process.seconds))
                process.seconds = seconds
            # Workers of pytest-xdist count for themselves; what was reparented keeps its first worker.
            mine = pid if _is_xdist(process.command) else process.worker
            process.worker = mine
            waiting += [(child, mine, process.test if mine == FORKED else "") for child in children[pid]]


def _forked_tests() -> dict[int, str]:
    """Returns the tests of programs that tests.warm has forked, by process id."""
    found = {}
    for directory in private_directory().glob(f"{PREFIX}*/"):
        for pid, variables in variables_of(directory).items():
            found[pid] = _name(variables.get(TEST, ""))
    return found


def _is_xdist(command: str) -> bool:
    return "import sys;exec(eval(sys.stdin.readline()))" in command


def _stats() -> dict[int, tuple[int, int, float]]:
    """Returns parent, start and CPU seconds by process id."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text()
            except OSError:  # ended meanwhile
                continue
            fields = text.rpartition(")")[2].split()
            found[int(entry.name)] = int(fields[1]), int(fields[19]), (int(fields[11]) + int(fields[12])) / TICK
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _test(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    name = f"{TEST}=".encode()
    found = next((value.removeprefix(name) for value in variables if value.startswith(name)), b"")
    return _name(found.decode(errors="replace"))


def _name(value: str) -> str:
    """Returns the test in a value of pytest's variable, which has the phase too."""
    return value.rpartition(" (")[0]
