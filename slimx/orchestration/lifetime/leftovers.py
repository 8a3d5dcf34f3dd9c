"""Kills the processes that a driver leaves behind, however the driver ended. Runs as `python -m
slimx.orchestration.lifetime.leftovers` in a child process of the driver.

Ray's agents outlive a killed raylet by a minute, and a stopped process of Ray never exits. Servers that run under a
guard process are not killed here: the guard detects that the driver is gone, stops them cleanly, and removes their
files in /dev/shm."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from slimx.runtime import process as guarded
from slimx.runtime.children import child_environment, python_argv

LOOK_S = 2.0
"""Interval between scans of the driver's descendants, in seconds."""
POLL_S = 0.2
"""Interval between checks that the driver is still running, in seconds."""
KILL_S = 10.0
"""Maximum number of seconds to wait for killed processes to disappear."""


def watch_over_this_process() -> None:
    """Starts a child process that waits for this process to end, and then kills the descendants that have outlived
    it."""
    subprocess.Popen(
        python_argv(__name__, str(os.getpid())),
        env=child_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C reaches only the driver
    )


def unguarded(root: psutil.Process) -> set[psutil.Process]:
    """Returns the descendant processes of `root`, except guard processes of servers and everything that runs under a
    guard."""
    try:
        descendants = {process.pid: process for process in root.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()
    descendants.pop(os.getpid(), None)
    parents = {}
    guards = set()
    for pid, process in descendants.items():
        parents[pid] = _parent(process)
        if _guards(process):
            guards.add(pid)

    def is_guarded(pid: int | None) -> bool:
        return pid in guards or (pid in parents and is_guarded(parents[pid]))

    return {process for pid, process in descendants.items() if not is_guarded(pid)}


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def _guards(process: psutil.Process) -> bool:
    try:
        return guarded.__name__ in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def outlive(owner: int) -> None:
    """Tracks the descendants of the process with id `owner`, which is the parent of this process, except descendants
    under a guard (`unguarded`). When the process `owner` ends, kills the descendants that are still running."""
    driver = psutil.Process(owner)
    known: set[psutil.Process] = set()
    look_at = 0.0
    while os.getppid() == owner:
        if time.monotonic() >= look_at:
            known = {process for process in known if process.is_running()} | unguarded(driver)
            look_at = time.monotonic() + LOOK_S
        time.sleep(POLL_S)
    deadline = time.monotonic() + KILL_S
    while (alive := {process for process in known if _lives(process)}) and time.monotonic() < deadline:
        for process in alive:
            known |= unguarded(process)
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.1)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    outlive(int(sys.argv[1]))
