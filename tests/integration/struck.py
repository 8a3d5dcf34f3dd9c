"""A run whose trainers are killed or stopped while it goes on, and the metrics that it must have in spite of it."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from slimx.durable import write_atomic
from tests.integration.hooks import PACE
from tests.integration.recorded import UNCHECKED
from tests.integration.runs import DEADLINE_S, TrainProcess, completed_steps, steps, write_config, written
from tests.integration.victims import command_of, matching

ENGINE = matching(r"sglang::|slimx\.engines\.server|ray::Engine")
MEASURED = re.compile(r"(time|perf|memory|recovery)/|publish/(\w+_seconds|wire_mib)|engines/outage")
"""Metrics that no two runs share: seconds, and bytes that travel. New ranks send all, whatever engines hold."""


@dataclass(frozen=True)
class Moment:
    """A rank, what is done to it, and the phase of a step in which that is."""

    phase: str
    rank: int
    signum: signal.Signals

    def __str__(self) -> str:
        return f"{self.signum.name}-rank{self.rank}-{self.phase}"


BEFORE = {"generate": "publish", "train": "prepare", "publish": "train", "save": "publish"}
"""By phase the one whose line in the timeline says that it begins; `save` comes every third step only.

A phase "write" begins with the first file of a version that rank 0 publishes by `disk`, for which there is no line.
"""


class Struck:
    """A run that goes on, and what is done to it."""

    def __init__(self, config: Path, *, cold: bool = False, ahead: int | None = None):
        """`cold`: as in TrainProcess. `ahead`: steps after that of a strike that are trained before the next strike;
        None: all."""
        self.ahead, self.pace = ahead, config.with_name("pace")
        self.allow(sys.maxsize if ahead is None else 1)
        self.process = TrainProcess(config, cold=cold, variables={PACE: str(self.pace)})
        self.directory = config.parent / "run"
        self.process.until(lambda: completed_steps(self.directory) >= 1)
        self.lasting = {process.pid for process in ENGINE(self.process)}
        assert self.lasting

    def allow(self, version: int) -> None:
        """Lets the run train rollouts of weights up to `version`, and wait then."""
        write_atomic(self.pace, str(version).encode(), sync=False)

    def phases(self) -> list[dict[str, Any]]:
        return written(self.directory / "timeline.jsonl")

    def recoveries(self) -> list[dict[str, Any]]:
        """Every time that all ranks were started again, those counted that were lost meanwhile."""
        return [line for line in self.phases() if line["track"] == "trainers" and "restart" in line["name"]]

    def metrics(self) -> dict[int, dict[str, float]]:
        """By step, those before the first left out."""
        return {step: row for step, row in steps(self.directory).items() if step > 0}

    def recovered(self) -> int:
        return sum(line["name"] == "restart" for line in self.recoveries())

    def rank(self, number: int) -> psutil.Process | None:
        """The present process of a rank, by the log that it prints to; a cluster may have started it."""
        log = str((self.directory / "logs" / f"trainer-{number}.log").resolve())
        for process in psutil.process_iter():
            with suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/1") == log and "ray::TrainerWorker" in command_of(process):
                    return process
        return None

    def strike(self, moment: Moment) -> None:
        """Do what `moment` says, as soon as its phase begins."""
        victim = self.rank(moment.rank)
        assert victim is not None, self.process.text()
        at = len(self.phases())
        if self.ahead is not None:
            self.allow(completed_steps(self.directory) + self.ahead)
        if moment.phase == "write":
            self._stop_as_it_writes(victim)
            victim.send_signal(moment.signum)
            return

        def begins() -> bool:
            # A phase may be over before the next look: then the strike falls a little later, but it falls.
            new = [line for line in self.phases()[at:] if line["track"] == "main"]
            before = [line for line in new if line["name"] == BEFORE[moment.phase]]
            return any(moment.phase != "save" or line["step"] % 3 == 0 for line in before)

        self.process.until(begins)
        victim.send_signal(moment.signum)

    def _stop_as_it_writes(self, victim: psutil.Process) -> None:
        """Stop `victim` between the first file of a published version and its last."""

        def stopped() -> bool:
            if not self._unfinished():
                return False
            victim.suspend()
            if self._unfinished():
                return True
            victim.resume()  # that version was complete in the meantime: the next one
            return False

        self.process.until(stopped)

    def _unfinished(self) -> list[Path]:
        return list((self.directory / "publish").glob("version-*.partial"))

    def goes_on(self, before: int, seen: int) -> None:
        """Wait for one recovery more than `before`, and a step more than `seen`."""
        self.process.until(lambda: self.recovered() > before and completed_steps(self.directory) > seen)
        assert {process.pid for process in ENGINE(self.process)} == self.lasting, "no engine was started again"


def config_of(directory: Path, model: Path, task: Path, *, count: int, replaced: int, **sections: Any) -> Path:
    """A run that is the same every time: one rollout at a time. `sections` are merged in."""
    directory.mkdir()
    rollout = {"prompts": str(task / "train.jsonl"), "concurrency": 1, "max_rollouts": 1, **UNCHECKED}
    defaults: dict[str, dict[str, Any]] = {
        "schedule": {"steps": count},
        "checkpoint": {"every": 3},
        "recovery": {"trainers": replaced},
        "trainer": {"watch_deadline": 10},
        "rollout": rollout,
        "reward": {"function": "tests.integration.hooks.paced_digits", "deadline": DEADLINE_S},
    }
    merged = {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults.keys() | sections.keys()}
    return write_config(directory, model, task / "train.jsonl", **merged)


def undisturbed(config: Path) -> dict[int, dict[str, float]]:
    run = TrainProcess(config)
    assert run.wait(3000) == 0, run.text()
    run.assert_nothing_left()
    return same(config.parent / "run")


def same(directory: Path) -> dict[int, dict[str, float]]:
    """The metrics of a run by step that any run with its configuration has, to the last bit."""
    kept = {
        step: {name: value for name, value in row.items() if not MEASURED.match(name)}
        for step, row in steps(directory).items()
    }
    assert {"loss/policy", "optim/grad_norm", "reward/mean", "gap/mean", "kl/rollout"} <= kept[1].keys()
    return kept


def ended_as(run: Struck, expected: dict[int, dict[str, float]]) -> None:
    """Wait for the end of `run`, which must have had the metrics `expected`."""
    run.allow(sys.maxsize)
    assert run.process.wait(3000) == 0, run.process.text()
    run.process.assert_nothing_left()
    found = same(run.directory)
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert found[step] == row, step
