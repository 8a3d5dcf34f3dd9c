"""Ends what a driver leaves behind, however it ends: `python -m slimx.orchestration.lifetime.remains`, a child of the
driver.

Ray's own agents outlive a killed raylet by a minute, and a stopped process of Ray's for ever. Servers under a guard are
left to it: it sees that its owner is gone, and ends them in order with what they have in /dev/shm.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from slimx.runtime import process as guarded
from slimx.runtime.children import child_environment, python_argv

LOOK_S = 2.0
"""Seconds between two looks at what the driver has started."""
POLL_S = 0.2
"""Seconds between two looks at whether the driver lives."""
KILL_S = 10.0
"""Seconds in which killed processes must be gone."""


def watch_over_this_process() -> None:
    """Start the process that ends what this one leaves behind."""
    subprocess.Popen(
        python_argv(__name__, str(os.getpid())),
        env=child_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the driver
    )


def unguarded(root: psutil.Process) -> set[psutil.Process]:
    """The descendants of `root`, without guards and what these watch over."""
    try:
        found = {one.pid: one for one in root.children(recursive=True) if one.pid != os.getpid()}
    except psutil.NoSuchProcess:
        return set()
    parents = {pid: _parent(one) for pid, one in found.items()}
    guards = {pid for pid, one in found.items() if _guards(one)}

    def watched_over(pid: int | None) -> bool:
        return pid in guards or (pid in parents and watched_over(parents[pid]))

    return {one for pid, one in found.items() if not watched_over(pid)}


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
    """Remember what `owner` starts until it ends, then kill what is left of it."""
    driver, seen, look_at = psutil.Process(owner), set(), 0.0
    while os.getppid() == owner:
        if time.monotonic() >= look_at:
            seen = {one for one in seen if one.is_running()} | unguarded(driver)
            look_at = time.monotonic() + LOOK_S
        time.sleep(POLL_S)
    end = time.monotonic() + KILL_S
    while (left := {one for one in seen if _lives(one)}) and time.monotonic() < end:
        for one in left:
            seen |= unguarded(one)
            try:
                one.kill()
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
