"""Processes that tests have started, or had started."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil


def lives(process: psutil.Process | int) -> bool:
    """Returns False for a process, or its id, that has ended, also before its parent has collected its status."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Waits until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def first_address(pid: int) -> str:
    """Returns the address of a process's first mapping: a fork has its modules where its parent has them, any other
    process at random addresses."""
    return Path(f"/proc/{pid}/maps").read_text().partition("-")[0]
