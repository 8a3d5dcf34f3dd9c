"""Processes of a run, found by their command lines, and the end of a run that loses one."""

from __future__ import annotations

import re
import signal
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
    """Finds processes by name and command line; guards, whose command lines hold those of what they guard, only if
    `guard` is true."""

    def find(run: TrainProcess) -> list[psutil.Process]:
        found = [(process, command_of(process)) for process in run.processes()]
        return [p for p, command in found if re.search(pattern, command) and ("runtime.process" in command) == guard]

    return find


VICTIMS: dict[str, Find] = {
    "driver": lambda run: [run.driver],
    "trainer": matching("ray::TrainerWorker"),
    "raylet": matching(r"^raylet "),
    "gcs": matching(r"^gcs_server "),
    "dashboard agent": matching("ray::DashboardAgent"),
    "runtime environment agent": matching("ray::RuntimeEnvAgent"),
}
"""Functions that find each kind of process of a run."""


def first_of(run: TrainProcess, victim: str) -> psutil.Process:
    """The oldest process of a kind."""
    found = VICTIMS[victim](run)
    assert found, victim
    return min(found, key=lambda process: process.pid)


def lost_with(run: TrainProcess, victim: str, signum: signal.Signals, code: int, names: str) -> None:
    """`signum` to a `victim` ends the run with `code`, in one sentence that has `names` in it; nothing is left."""
    first_of(run, victim).send_signal(signum)
    assert run.wait() == code, run.text()
    run.assert_nothing_left()
    if victim != "driver":
        sentences = [line for line in run.text().splitlines() if line.startswith("slimx: ")]
        assert len(sentences) == 1 and names in sentences[0], run.text()
        assert "Traceback" not in run.text()
