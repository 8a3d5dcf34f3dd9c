"""One run, one signal to one kind of its processes, and what must follow: it goes on, or it ends in one sentence and
the same command resumes."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.integration.runs import TrainProcess, completed_steps, steps, write_config
from tests.integration.victims import Find, matching

START_S = 600
"""Seconds in which trainers and engines must have started."""


VICTIMS: dict[str, Find] = {
    "driver": lambda run: [run.driver],
    "trainer": matching("ray::TrainerWorker"),
    "raylet": matching(r"^raylet "),
    "gcs": matching(r"^gcs_server "),
    "dashboard agent": matching("ray::DashboardAgent"),
    "runtime environment agent": matching("ray::RuntimeEnvAgent"),
}
"""Functions that find each kind of process of a run."""


@dataclass(frozen=True)
class Fault:
    """One row of the table: what is done to which process, and what must follow."""

    victim: str
    signum: signal.Signals
    ends: int | None
    """Exit status of a run that ends; None: it goes on."""
    names: str = ""
    """A name that the one sentence of a run that ends must contain."""
    sections: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Sections of the run's configuration, over those of `config_of`."""
    lasts: float | None = None
    """Seconds after which a stopped process is continued; None: it is not."""

    def __str__(self) -> str:
        return f"{self.victim}-{self.signum.name}"


def config_of(fault: Fault, directory: Path, model: Path, prompts: Path) -> Path:
    """A run that saves every step and does not end by itself."""
    sections: dict[str, dict[str, Any]] = {
        "schedule": {"steps": 1000},
        "checkpoint": {"every": 1},
        "trainer": {"watch_deadline": 10},
        "cluster": {"start_deadline": START_S, "ray_deadline": 15, "stop_deadline": 60},
    }
    for name, section in fault.sections.items():
        sections[name] = sections.get(name, {}) | section
    return write_config(directory, model, prompts, **sections)


def strike(fault: Fault, directory: Path, model: Path, prompts: Path) -> TrainProcess:
    """Do what `fault` says to a run after its second step; returns when what must follow has been seen."""
    config, out = config_of(fault, directory, model, prompts), directory / "run"
    run = TrainProcess(config, cold=True)
    run.until(lambda: completed_steps(out) >= 2 and any((out / "checkpoints").glob("iter_???????")))
    if fault.ends is not None:
        lost_with(run, fault.victim, fault.signum, fault.ends, fault.names)
        resumes(config, out)
        return run
    victim = first_of(run, fault.victim)
    victim.send_signal(fault.signum)
    if fault.lasts is not None:
        time.sleep(fault.lasts)
        victim.send_signal(signal.SIGCONT)
    seen = completed_steps(out)
    run.until(lambda: completed_steps(out) >= seen + 3)
    run.kill(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.text()
    run.assert_nothing_left()
    return run


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
        said = [line for line in run.text().splitlines() if line.startswith("slimx: ")]
        assert len(said) == 1 and names in said[0], run.text()
        assert "Traceback" not in run.text()


def resumes(config: Path, out: Path) -> None:
    """The same command goes on from the newest checkpoint, to one step more than was written."""
    done = completed_steps(out)
    again = TrainProcess(config, f"schedule.steps={done + 1}", cold=True)
    assert again.wait() == 0, again.text()
    assert "resumed at step" in again.text()
    again.assert_nothing_left()
    assert sorted(steps(out)) == list(range(1, done + 2))
