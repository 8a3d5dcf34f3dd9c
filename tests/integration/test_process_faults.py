"""Every kind of process of a run is killed, and stopped: the run goes on, or ends in one sentence and resumes.

A row of FAULTS is one kind and one signal. They run in `make test-all`; `make test` has a killed driver in
`test_resume.py`, a killed trainer and a SIGTERM in `test_run.py`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP
from typing import Any

import pytest

from slimx.errors import LOST
from tests.integration.runs import TrainProcess, completed_steps, steps, write_config
from tests.integration.victims import first_of, lost_with

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow("full grid of processes and signals"),
    pytest.mark.timeout(1800),
]

START_S = 600
"""Seconds in which trainers and engines must have started."""


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


def resumes(config: Path, out: Path) -> None:
    """The same command goes on from the newest checkpoint, to one step more than was written."""
    done = completed_steps(out)
    again = TrainProcess(config, f"schedule.steps={done + 1}", cold=True)
    assert again.wait() == 0, again.text()
    assert "resumed at step" in again.text()
    again.assert_nothing_left()
    assert sorted(steps(out)) == list(range(1, done + 2))


FAULTS = [
    Fault("driver", SIGINT, ends=128 + SIGINT),
    Fault("driver", SIGKILL, ends=-SIGKILL),
    Fault("driver", SIGSTOP, ends=None, lasts=40, sections={"rollout": {"rollout_deadline": 20}}),
    Fault("trainer", SIGKILL, ends=LOST, names="trainer rank "),
    Fault("trainer", SIGSTOP, ends=LOST, names="trainer rank "),
    Fault("raylet", SIGKILL, ends=LOST, names="Ray's raylet "),
    Fault("raylet", SIGSTOP, ends=LOST, names="Ray's raylet "),
    Fault("dashboard agent", SIGKILL, ends=LOST, names="Ray's "),
    Fault("runtime environment agent", SIGKILL, ends=LOST, names="Ray's "),
    Fault("gcs", SIGKILL, ends=LOST, names="Ray's GCS "),
    Fault("gcs", SIGSTOP, ends=LOST, names="Ray's GCS "),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_run_whose_process_is_killed_or_stopped(
    fault: Fault, tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    strike(fault, tmp_path, tiny_model, task_of_sums / "train.jsonl")
    if (fault.victim, fault.signum) == ("trainer", SIGSTOP):
        (stacks,) = (tmp_path / "run/stacks").iterdir()
        assert "==== trainer-0" in stacks.read_text(), "where everybody was when it was given up"
