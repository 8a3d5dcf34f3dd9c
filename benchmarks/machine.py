"""Describes the machine of a benchmark's figures."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version

import psutil


def cpu_seconds() -> float:
    """Returns the CPU seconds so far of all processes of this machine, except this process and its children."""
    me, machine = psutil.Process(), psutil.cpu_times()
    busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice  # guests are in user
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            busy -= sum(process.cpu_times()[:4])  # of children that have ended, too
    return busy


def surroundings(*packages: str) -> str:
    """Returns machine, date and the versions of `packages` in one line."""
    versions = " ".join(f"{package} {version(package)}" for package in packages)
    return (
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, no GPU used; "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}; Python {platform.python_version()}, {versions}"
    )
