"""Processes that tests have started, or had started."""

from __future__ import annotations

import psutil


def lives(process: psutil.Process) -> bool:
    """Return False for a process that has ended, also while whoever adopted it has not asked for its status yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
