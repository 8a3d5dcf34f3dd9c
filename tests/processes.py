"""Processes that tests have started, or had started."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def lives(process: psutil.Process | int) -> bool:
    """Return False for a process, or its id, that has ended, also while nobody has asked for its status yet."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
