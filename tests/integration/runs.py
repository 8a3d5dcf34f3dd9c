"""Drives whole runs of `slimx train` as a user does: a process, its run directory, and what it leaves behind."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import yaml

from slimx.data.saved.codec import decode
from slimx.rollout.flow.tickets import SavedTicket
from slimx.runtime.process import PR_SET_CHILD_SUBREAPER, shared_memory_inodes
from tests import stacks
from tests.processes import lives
from tests.warm.interpreter import MARK, interpreter, is_client, programs

DEADLINE_S = 600
"""Seconds for whatever a run is waited for, and for each step of its own: who is late hangs. Under a load of 15 some
runs took longer than 300."""
END_S = 180
"""Seconds in which everything of an ended run must be gone: a killed one takes 8 on a quiet machine."""


def write_config(directory: Path, model: Path, prompts: Path, **sections: dict[str, Any]) -> Path:
    """Writes a small GRPO run: 4 prompts x 2 rollouts a step, two trainer ranks, one engine. Merges `sections` in."""
    config: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "dir": str(directory / "run")},
        "model": {"path": str(model)},
        "numerics": {"dtype": "float32"},
        "cluster": {"start_deadline": DEADLINE_S},
        "trainer": {"world_size": 2, "expert": 2, "deadline": DEADLINE_S, "optimizer": {"lr": 1e-3}},
        "rollout": {
            "prompts": str(prompts),
            "prompts_per_step": 4,
            "group_size": 2,
            "max_prompt_tokens": 64,
            "engines": [{"name": "actor", "max_total_tokens": 8192}],
            "sampling": {"max_new_tokens": 4},
        },
        # Random weights never answer right: reward something that sampling does change.
        "reward": {"function": "tests.integration.hooks.digits"},
        "schedule": {"steps": 4, "step_deadline": DEADLINE_S},
        "track": {"report": False, "tensorboard": False},
    }
    for name, section in sections.items():
        config.setdefault(name, {}).update(section)
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


OF_TESTS = "slimx-test-"
"""Prefix of directories in /dev/shm that a unit test makes, which may run at the same time as a run."""


class TrainProcess:
    """One `slimx train` process."""

    started: ClassVar[list[TrainProcess]] = []

    def __init__(
        self,
        config: Path,
        *overrides: str,
        program: Sequence[str | Path] | None = None,
        directory: Path = Path(__file__).parents[2],
        variables: Mapping[str, str] | None = None,
        cold: bool = False,
    ):
        """Starts a run in the working directory `directory`. `variables`: added to the environment. `cold`: processes
        are programs that import what they need, below the driver, instead of forks (tests.warm); so is `program`."""
        program = program or (sys.executable if cold else interpreter(), "-m", "slimx.cli")
        # What a run leaves behind becomes a child of this process: the router, say, overwrites its environment.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.before = {process.pid for process in psutil.Process().children()}
        self.mark = uuid.uuid4().hex
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.output = config.with_name(f"out-{self.mark[:8]}.log")
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(
                # The tests' process may end before the run.
                ["setpriv", "--pdeathsig", "TERM", *program, "train", str(config), *overrides],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONWARNINGS": "ignore", **(variables or {}), MARK: self.mark},
                cwd=directory,
            )
        self.started.append(self)

    @property
    def driver(self) -> psutil.Process:
        """The driver, a child of the process that was started."""
        (driver,) = psutil.Process(self.process.pid).children()
        return driver

    def wait(self, seconds: float = DEADLINE_S) -> int:
        """Waits for the run to end; returns its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {seconds} s\n{self.text()}\n{self.stacks()}") from None

    def text(self) -> str:
        return self.output.read_text()

    def stacks(self) -> str:
        """Stacks of the run's Python processes."""
        return stacks.collect(process.pid for process in self.processes())

    def until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Waits until `condition` holds while the process runs."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, f"{self.text()}\n{self.stacks()}"
            time.sleep(0.02)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self.process.send_signal(signum)

    def processes(self) -> list[psutil.Process]:
        """Returns every living process of this run, also those whose parent has ended."""
        found: dict[int, psutil.Process] = {}
        for child in psutil.Process().children():
            # Orphans of the run came here; those that have ended wait to be collected.
            if child.pid not in self.before and child.pid != self.process.pid and not _collected(child):
                found |= {process.pid: process for process in [child, *_children(child)]}
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found |= {one.pid: one for one in [process, *_children(process)]}
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        for process in programs(self.mark):
            found |= {one.pid: one for one in [process, *_children(process)]}
        return [process for process in found.values() if lives(process) and not is_client(process)]

    def assert_nothing_left(self) -> None:
        """Asserts that no process (so no port that one listens on) and no shared-memory file of the run remains."""
        end = time.monotonic() + END_S
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        names = []
        for process in left:
            try:
                names.append(" ".join(process.cmdline())[:120] or process.name())
                process.kill()
            except psutil.NoSuchProcess:
                continue
        assert not names, f"{END_S} s after the end of the run there are still: {names}"
        # What a living process has mapped now is somebody else's: everything of this run has ended.
        others = shared_memory_inodes(1)
        new = {name: Path("/dev/shm", name) for name in os.listdir("/dev/shm") if name not in self.shared_memory}
        new = {name: path for name, path in new.items() if not name.startswith(OF_TESTS)}
        files = sorted(name for name, path in new.items() if path.exists() and path.stat().st_ino not in others)
        assert not files, files


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _collected(child: psutil.Process) -> bool:
    """Returns True if `child` of this process has ended; it is collected then."""
    try:
        return os.waitpid(child.pid, os.WNOHANG)[0] == child.pid
    except ChildProcessError:
        return True


def written(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file that a run may be writing: the last line is not there until its end is."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def steps(directory: Path) -> dict[int, dict[str, float]]:
    """Returns metrics.jsonl of a run by step; a step that is in it twice is an error."""
    rows = written(directory / "metrics.jsonl")
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row["metrics"] for row in rows}


def completed_steps(directory: Path) -> int:
    """Returns the newest step in metrics.jsonl; 0 before the first."""
    file = directory / "metrics.jsonl"
    return max((row["step"] for row in written(file)), default=0) if file.exists() else 0


def saved_tickets(checkpoint: Path) -> list[SavedTicket]:
    """Returns the tickets in a checkpoint."""
    return decode(list[SavedTicket], (checkpoint / "slimx" / "tickets.bin").read_bytes())
