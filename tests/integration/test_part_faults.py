"""The parts of a run that are started again are killed and stopped, one after the other, and the run goes on each time.

All rows strike one run: a start takes longer than most recoveries. `tests/integration/test_process_faults.py` has the
parts whose loss ends a run; `tests/unit/engines/test_router_faults.py` has the router's rows without a run, for
`make test`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.runs import TrainProcess, completed_steps, steps, write_config, written
from tests.integration.victims import Find, command_of, matching
from tests.processes import lives

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow("a whole run with a strike at each part"),
    pytest.mark.timeout(3600),
]

START_S = 900
BACK_S = 900
"""Seconds in which a run that goes on has done so: a hang is what this finds, not slowness."""
STEPS = 3
"""Steps after a strike that show that the run goes on: the first may have been under way."""


def reward_workers(run: TrainProcess) -> list[psutil.Process]:
    """Processes that the driver itself spawned."""
    children = run.driver.children()
    return [process for process in children if "spawn_main" in command_of(process)]


def environments(run: TrainProcess) -> list[psutil.Process]:
    """Children of the server that forks one for each environment. They live as long as a rollout."""
    servers = [p for p in run.driver.children() if "forkserver" in command_of(p)]
    return [child for server in servers for child in server.children()]


@dataclass(frozen=True)
class Part:
    """A kind of process, and what its loss costs."""

    find: Find
    restarts: str = ""
    """The part that is started again for it, as restarts name it; "": none is."""
    outlives_a_stop: bool = False
    """True if the run goes on while the part is stopped, so that it may be left as it is."""


ENGINE = "engine actor-0"
PARTS = {
    "router": Part(matching(r"sglang::router|slimx\.engines\.server\.router_launch"), "router"),
    "router guard": Part(
        matching(r"slimx\.engines\.server\.router_launch", guard=True), "router", outlives_a_stop=True
    ),
    "scheduler": Part(matching("sglang::scheduler"), ENGINE),
    "detokenizer": Part(matching("sglang::detokenizer"), ENGINE),
    "HTTP server": Part(matching(r"slimx\.engines\.server\.launch"), ENGINE),
    "engine guard": Part(matching(r"slimx\.engines\.server\.launch", guard=True), ENGINE, outlives_a_stop=True),
    "engine actor": Part(matching("ray::Engine"), ENGINE),
    "reward worker": Part(reward_workers, outlives_a_stop=True),
    "environment": Part(environments),
}


@dataclass(frozen=True)
class Struck:
    """The run, and its directory."""

    process: TrainProcess
    directory: Path

    def steps(self) -> int:
        return completed_steps(self.directory)

    def restarts(self, part: str) -> int:
        """Restarts of `part` that succeeded, by the timeline."""
        lines = written(self.directory / "timeline.jsonl")
        done = [line for line in lines if line["track"] == part and line["name"] == "restart"]
        assert all(line["detail"] for line in done), "every restart has a reason"
        return len(done)


@pytest.fixture(scope="module")
def run(tiny_model: Path, task_of_sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    """A run with every part that can be struck; it must end in order after all strikes."""
    directory = tmp_path_factory.mktemp("parts")
    sections: dict[str, dict[str, Any]] = {
        "cluster": {"start_deadline": START_S},
        "schedule": {"steps": 100_000, "step_deadline": BACK_S},
        "trainer": {"world_size": 1, "expert": 1, "deadline": BACK_S},
        "publish": {"transport": "nixl", "deadline": BACK_S, "engine_deadline": 60},
        "reward": {"isolation": "process", "workers": 2, "deadline": 8},
        "rollout": {
            "prompts": str(task_of_sums / "train.jsonl"),
            "generate": "tests.integration.hooks.echoed",
            "sampling": {"max_new_tokens": 60},
            "max_failed_share": 1.0,
            "health": {"restarts": 50},
        },
    }
    config = write_config(directory, tiny_model, task_of_sums / "train.jsonl", **sections)
    process = TrainProcess(config, cold=True)
    run = Struck(process, directory / "run")
    process.until(lambda: run.steps() >= 2)
    yield run
    process.kill(signal.SIGTERM)
    assert process.wait(BACK_S) == 128 + signal.SIGTERM, process.text()
    process.assert_nothing_left()
    for step, row in steps(run.directory).items():
        assert row["staleness/max"] == 0, step


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=lambda signum: signum.name)
@pytest.mark.parametrize("name", PARTS)
def test_a_run_survives_a_kill_or_stop_of_any_replaceable_part(name: str, signum: signal.Signals, run: Struck) -> None:
    part, found = PARTS[name], []
    before = run.restarts(part.restarts) if part.restarts else 0

    def there() -> bool:
        found[:] = part.find(run.process)
        return bool(found)

    run.process.until(there)
    victim = found[0]
    seen, began = run.steps(), time.monotonic()
    victim.send_signal(signum)
    run.process.until(lambda: run.steps() > seen)
    following = time.monotonic() - began
    run.process.until(lambda: run.steps() >= seen + STEPS)
    print(f"{name}, {signum.name}: a step after {following:.1f} s, {STEPS} after {time.monotonic() - began:.1f} s")
    if signum is signal.SIGSTOP and part.outlives_a_stop:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker that was given a call was ended at its deadline
            victim.send_signal(signal.SIGCONT)
        return
    run.process.until(lambda: not lives(victim))
    if part.restarts:
        assert run.restarts(part.restarts) > before, run.process.text()
