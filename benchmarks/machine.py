"""The machine that the figures of a benchmark belong to."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version

import psutil


def cpu_seconds() -> float:
    """CPU time so far of everything on this machine except this process and what it started."""
    me, machine = psutil.Process(), psutil.cpu_times()
    busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice  # guests are in user
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            busy -= sum(process.cpu_times()[:4])  # of children that have ended, too
    return busy


def surroundings(*packages: str) -> str:
    """Machine, date and the versions of `packages` in one line."""
    versions = " ".join(f"{package} {version(package)}" for package in packages)
    return (
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, no GPU used; "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}; Python {platform.python_version()}, {versions}"
    )
