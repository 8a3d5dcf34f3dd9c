"""Python stacks of the processes of a run on this machine, by py-spy: for `slimx stacks`, and when a deadline strikes.

A run's processes are found by what they hold: its driver the lock of its directory, its ranks, servers and routers
their logs in RUN/logs, and the others are children of these. So nobody has to write down who belongs to a run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from slimx.observability.live.run_lock import LOCK, is_held

DIRECTORY = "stacks"
DUMP_S = 10.0
"""Seconds for one process."""
AT_ONCE = 4
KEPT = 50
"""Files in RUN/stacks; a run that loses engines for weeks fills no disk with them."""
DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a run."""

    name: str
    """driver, trainer-0, engine-actor-0, ..., and the title of the process; a child has its parent's name."""
    pid: int


@dataclass(frozen=True, slots=True)
class Stack:
    """The threads of one process, or why there are none."""

    member: Member
    text: str
    found: bool


def members(directory: Path) -> list[Member]:
    """The processes of the run in `directory` on this machine, as far as this user may see them."""
    lock, logs = (directory / LOCK).absolute().resolve(), (directory / "logs").absolute().resolve()
    named: dict[int, Member] = {}
    for process in psutil.process_iter():
        files = _files(process.pid)
        if lock in files and is_held(directory):
            named[process.pid] = Member(DRIVER, process.pid)
        elif log := next((file for file in files if file.parent == logs), None):
            named[process.pid] = Member(f"{log.stem}: {_called(process)}", process.pid)
    waiting = list(named.values())
    while waiting:
        parent = waiting.pop()
        of = parent.name.partition(":")[0]
        for child in _children(parent.pid):
            if child.pid not in named:
                named[child.pid] = Member(f"{of}: {_called(child)}", child.pid)
                waiting.append(named[child.pid])
    return sorted(named.values(), key=lambda member: (member.name != DRIVER, member.name, member.pid))


def stacks(directory: Path) -> list[Stack]:
    """The stacks of all of them. Takes up to `DUMP_S` seconds for each `AT_ONCE` processes that do not answer."""
    found = members(directory)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [stack for stack in pool.map(_stack, found) if stack is not None]


def write_stacks(directory: Path, why: str) -> Path:
    """Write the stacks to RUN/stacks/TIME.txt, after the line `why`; returns the file. The newest `KEPT` files stay."""
    # Microseconds: engines that are given up together have a file each.
    file = directory / DIRECTORY / f"{datetime.now():%Y%m%d-%H%M%S-%f}.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{why}\n\n{told(stacks(directory))}")
    for old in sorted(file.parent.glob("*.txt"))[:-KEPT]:
        old.unlink(missing_ok=True)
    return file


def told(found: Sequence[Stack]) -> str:
    """The stacks as text, one process after the other."""
    return "\n".join(f"==== {each.member.name}, process {each.member.pid}\n{each.text.rstrip()}\n" for each in found)


def _stack(member: Member) -> Stack | None:
    """None for a process that has ended, or whose program is not Python."""
    program = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(member.pid)]
    try:
        if not Path(f"/proc/{member.pid}/exe").readlink().name.startswith("python"):
            return None
        if psutil.Process(member.pid).status() == psutil.STATUS_STOPPED:
            program.append("--nonblocking")  # it stands still already, and py-spy could not stop it
        done = subprocess.run(program, capture_output=True, text=True, timeout=DUMP_S)
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None
    except PermissionError:
        return Stack(member, "it belongs to another user", found=False)
    except subprocess.TimeoutExpired:
        return Stack(member, f"py-spy has not read it within {DUMP_S:g} s", found=False)
    if done.returncode == 0:
        return Stack(member, done.stdout, found=True)
    if not psutil.pid_exists(member.pid):
        return None
    said = " ".join(done.stderr.partition("Stack backtrace")[0].split())
    if "ermission" in said or "not permitted" in said:
        said = "py-spy may not look into it: be root, give the container SYS_PTRACE, or set kernel.yama.ptrace_scope=0"
    return Stack(member, said, found=False)


def _files(pid: int) -> set[Path]:
    """Files that a process has open; none where this user may not see them."""
    folder = Path(f"/proc/{pid}/fd")
    found = set()
    try:
        for each in folder.iterdir():
            found.add(each.readlink())
    except OSError:
        return found
    return found


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _called(process: psutil.Process) -> str:
    """The title of a process, or its program and module."""
    try:
        words = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "gone"
    if len(words) < 2:
        return " ".join(words) or process.name()
    return " ".join([os.path.basename(words[0]), *words[1:4]])[:80]
