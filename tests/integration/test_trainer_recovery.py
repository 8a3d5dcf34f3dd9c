"""Trainers that are killed or stopped are replaced in a run that goes on, with the metrics of one that was left alone.

All moments strike one run: a start takes longer than a recovery.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.recorded import UNCHECKED
from tests.integration.runs import TrainProcess, completed_steps, steps, write_config
from tests.integration.victims import matching

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

STEPS = 24
RANDOM_STEPS = 220
"""Steps of the run that is struck at random: enough for all strikes to fall into it."""
STRIKES = 50
ENGINE = matching(r"sglang::|slimx\.engines\.server|ray::EngineActor")
TRAINERS = matching("ray::TrainerWorker")
MEASURED = re.compile(r"(time|perf|memory|recovery)/|publish/\w+_seconds|engines/outage")
"""Metrics that no two runs share: seconds and bytes."""


@dataclass(frozen=True)
class Moment:
    """A rank, what is done to it, and the phase of a step in which that is."""

    phase: str
    rank: int
    signum: signal.Signals

    def __str__(self) -> str:
        return f"{self.signum.name}-rank{self.rank}-{self.phase}"


MOMENTS = [
    Moment("generate", 1, signal.SIGKILL),
    Moment("train", 0, signal.SIGKILL),
    Moment("train", 1, signal.SIGSTOP),
    Moment("publish", 0, signal.SIGKILL),
    Moment("save", 1, signal.SIGKILL),
]
BEFORE = {"generate": "publish", "train": "prepare", "publish": "train", "save": "publish"}
"""By phase the one whose line in the timeline says that it begins; `save` comes every third step only."""


class Struck:
    """A run that goes on, and what is done to it."""

    def __init__(self, config: Path):
        self.process, self.directory = TrainProcess(config), config.parent / "run"
        self.process.until(lambda: completed_steps(self.directory) >= 1)
        self.lasting = {process.pid for process in ENGINE(self.process)}
        assert self.lasting

    def phases(self) -> list[dict[str, Any]]:
        lines = (self.directory / "timeline.jsonl").read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def recoveries(self) -> list[dict[str, Any]]:
        """Every time that all ranks were started again, those counted that were lost meanwhile."""
        return [line for line in self.phases() if line["track"] == "trainers" and "restart" in line["name"]]

    def recovered(self) -> int:
        return sum(line["name"] == "restart" for line in self.recoveries())

    def rank(self, number: int) -> psutil.Process | None:
        """The present process of a rank, by the log that it prints to."""
        for process in TRAINERS(self.process):
            try:
                if os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"trainer-{number}.log"):
                    return process
            except OSError:
                continue
        return None

    def strike(self, moment: Moment) -> None:
        """Do what `moment` says, as soon as its phase begins."""
        victim = self.rank(moment.rank)
        assert victim is not None, self.process.text()
        at = len(self.phases())

        def begins() -> bool:
            # A phase may be over before the next look: then the strike falls a little later, but it falls.
            new = [line for line in self.phases()[at:] if line["track"] == "main"]
            before = [line for line in new if line["name"] == BEFORE[moment.phase]]
            return any(moment.phase != "save" or line["step"] % 3 == 0 for line in before)

        self.process.until(begins)
        victim.send_signal(moment.signum)

    def goes_on(self, before: int, seen: int) -> None:
        """Wait for one recovery more than `before`, and a step more than `seen`."""
        self.process.until(lambda: self.recovered() > before and completed_steps(self.directory) > seen)
        assert {process.pid for process in ENGINE(self.process)} == self.lasting, "no engine was started again"


def config_of(directory: Path, model: Path, task: Path, *, count: int, replaced: int) -> Path:
    """A run that is the same every time: one rollout at a time."""
    directory.mkdir()
    rollout = {"prompts": str(task / "train.jsonl"), "concurrency": 1, "max_rollouts": 1, "health": UNCHECKED}
    return write_config(
        directory,
        model,
        task / "train.jsonl",
        schedule={"steps": count},
        checkpoint={"every": 3},
        recovery={"trainers": replaced},
        trainer={"watch_deadline": 10},
        rollout=rollout,
    )


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
    assert run.process.wait(3000) == 0, run.process.text()
    run.process.assert_nothing_left()
    found = same(run.directory)
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert found[step] == row, step


@pytest.fixture(scope="module")
def run(tiny_model: Path, task_of_sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    """A run that is struck; in the end it must have the metrics of one that was not."""
    base = tmp_path_factory.mktemp("recovery")
    struck = Struck(config_of(base / "struck", tiny_model, task_of_sums, count=STEPS, replaced=20))
    yield struck
    expected = undisturbed(config_of(base / "alone", tiny_model, task_of_sums, count=STEPS, replaced=20))
    ended_as(struck, expected)


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_rank_that_is_killed_or_stopped_is_replaced_while_the_run_goes_on(moment: Moment, run: Struck) -> None:
    before, seen = run.recovered(), completed_steps(run.directory)
    run.strike(moment)
    began = time.monotonic()
    run.goes_on(before, seen)
    print(
        f"{moment}: the next step after {time.monotonic() - began:.1f} s; {run.recoveries()[-1]['seconds']:.1f} s down"
    )


@pytest.mark.slow
def test_struck_at_random_moments_a_run_has_the_metrics_of_one_that_was_left_alone(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    config = config_of(tmp_path / "struck", tiny_model, task_of_sums, count=RANDOM_STEPS, replaced=4 * STRIKES)
    run = Struck(config)
    for number in range(STRIKES):
        # Without regard to phases, and now and then into the recovery before.
        time.sleep(chance.uniform(0, 4))
        before, seen = run.recovered(), completed_steps(run.directory)
        rank, signum = chance.randrange(2), chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        run.process.until(lambda rank=rank: run.rank(rank) is not None)
        phase = run.phases()[-1]
        run.rank(rank).send_signal(signum)
        if chance.random() < 0.8:
            run.goes_on(before, seen)
        print(f"{number}: {signum.name} to rank {rank} after {phase['name']} of step {phase['step']}", flush=True)
    alone = config_of(tmp_path / "alone", tiny_model, task_of_sums, count=RANDOM_STEPS, replaced=1)
    ended_as(run, undisturbed(alone))
    down = sorted(line["seconds"] for line in run.recoveries() if line["name"] == "restart")
    print(f"{len(down)} recoveries, {down[0]:.1f} to {down[-1]:.1f} s, median {down[len(down) // 2]:.1f} s")
