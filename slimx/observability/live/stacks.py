"""Python stacks of a run's processes on this machine, read by py-spy, for `slimx stacks` and missed deadlines.

The processes of a run are found by their open files. The driver has the lock of the run's directory open; ranks,
servers and routers have their logs in RUN/logs open. All other processes of the run are children of these."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from slimx.observability.live.run_lock import LOCK, is_locked

DIRECTORY = "stacks"
DUMP_S = 10.0
"""Seconds to wait for py-spy to read the stacks of one process."""
AT_ONCE = 4
"""Number of processes whose stacks are read at the same time."""
KEPT = 50
"""Maximum number of files in RUN/stacks; older ones are removed."""
DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Member:
    """A process that belongs to a run."""

    name: str
    """Part of the run that the process belongs to, such as driver, trainer-0 or engine-actor-0, followed, except for
    the driver, by the process title. A child process belongs to the same part as its parent."""
    pid: int


@dataclass(frozen=True, slots=True)
class Stack:
    """Stacks of all threads in one process."""

    member: Member
    text: str
    """Stacks of all threads in the process, or the reason why they could not be read."""
    found: bool
    """True if the stacks could be read; False if `text` contains the reason why they could not."""


def members(directory: Path) -> list[Member]:
    """Returns the processes on this machine that belong to the run in `directory` and that this user may examine."""
    lock = (directory / LOCK).absolute().resolve()
    logs = (directory / "logs").absolute().resolve()
    named: dict[int, Member] = {}
    for process in psutil.process_iter():
        files = _files(process.pid)
        if lock in files and is_locked(directory):
            named[process.pid] = Member(DRIVER, process.pid)
            continue
        log = next((file for file in files if file.parent == logs), None)
        if log is not None:
            named[process.pid] = Member(f"{log.stem}: {_title(process)}", process.pid)
    waiting = list(named.values())
    while waiting:
        parent = waiting.pop()
        parent_name = parent.name.partition(":")[0]
        for child in _children(parent.pid):
            if child.pid not in named:
                named[child.pid] = Member(f"{parent_name}: {_title(child)}", child.pid)
                waiting.append(named[child.pid])
    return sorted(named.values(), key=lambda member: (member.name != DRIVER, member.name, member.pid))


def stacks(directory: Path) -> list[Stack]:
    """Reads the stacks of all processes of the run in `directory` on this machine. Takes up to `DUMP_S` seconds for
    every `AT_ONCE` processes that do not respond."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [stack for stack in pool.map(_stack, members(directory)) if stack is not None]


def write_stacks(directory: Path, why: str) -> Path:
    """Writes `why`, a line that says why the stacks are written, and the stacks of the run's processes to
    RUN/stacks/TIME.txt, and returns the path of this file. Only the newest `KEPT` files are kept."""
    # With microseconds, engines that are lost at the same time get separate files.
    file = directory / DIRECTORY / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{why}\n\n{stacks_text(stacks(directory))}")
    for old in sorted(file.parent.glob("*.txt"))[:-KEPT]:
        old.unlink(missing_ok=True)
    return file


def stacks_text(found: Sequence[Stack]) -> str:
    """Formats stacks as text, one process after another."""
    parts = [f"==== {stack.member.name}, process {stack.member.pid}\n{stack.text.rstrip()}\n" for stack in found]
    return "\n".join(parts)


def _stack(member: Member) -> Stack | None:
    """Reads the stacks of a process. Returns None if the process has ended or does not run Python."""
    program = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(member.pid)]
    try:
        if not Path(f"/proc/{member.pid}/exe").readlink().name.startswith("python"):
            return None
        if psutil.Process(member.pid).status() == psutil.STATUS_STOPPED:
            program.append("--nonblocking")  # because py-spy cannot pause a stopped process
        done = subprocess.run(program, capture_output=True, text=True, timeout=DUMP_S)
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None
    except PermissionError:
        return Stack(member, "the process belongs to another user", found=False)
    except subprocess.TimeoutExpired:
        return Stack(member, f"py-spy has not read the stacks within {DUMP_S:g} s", found=False)
    if done.returncode == 0:
        return Stack(member, done.stdout, found=True)
    if not psutil.pid_exists(member.pid):
        return None
    reason = " ".join(done.stderr.partition("Stack backtrace")[0].split())
    if "ermission" in reason or "not permitted" in reason:
        reason = (
            "py-spy lacks permission; run as root, add the capability SYS_PTRACE to the container, or set "
            "kernel.yama.ptrace_scope=0"
        )
    return Stack(member, reason, found=False)


def _files(pid: int) -> set[Path]:
    """Returns the files that a process has open; an empty set if this user may not see them."""
    files = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            files.add(descriptor.readlink())
    except OSError:
        return files
    return files


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    """Returns the program and first arguments of a process, or the title that the process has given itself."""
    try:
        words = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "gone"
    if len(words) < 2:
        return " ".join(words) or process.name()
    return " ".join([os.path.basename(words[0]), *words[1:4]])[:80]
