"""Processes of a run, found by their command lines."""

from __future__ import annotations

import re
from collections.abc import Callable

import psutil

from tests.integration.runs import TrainProcess

Find = Callable[[TrainProcess], list[psutil.Process]]


def command_of(process: psutil.Process) -> str:
    """Name and command line of a process; "" if it has ended."""
    try:
        return f"{process.name()} {' '.join(process.cmdline())}"
    except psutil.Error:
        return ""


def matching(pattern: str, *, guard: bool = False) -> Find:
    """Finds processes by name and command line; guards, whose command lines hold those of what they guard, only if they
    are asked for."""

    def find(run: TrainProcess) -> list[psutil.Process]:
        found = [(process, command_of(process)) for process in run.processes()]
        return [p for p, command in found if re.search(pattern, command) and ("runtime.process" in command) == guard]

    return find
