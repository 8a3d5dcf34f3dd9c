"""The stacks of a run's processes: they are found by what they hold, and one that hangs does not hold up the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from slimx.errors import DeadlineError, PartLost, SlimxError
from slimx.extras.watch.status import run_stacks
from slimx.observability.live import stacks as module
from slimx.observability.live.stacks import members, stacks
from slimx.orchestration.lifetime.hangs import keep_stacks
from tests.refusals import refused

DRIVER = """
import subprocess, sys, time
from pathlib import Path
from slimx.observability.live.run_lock import locked

def waits_for_the_rank(rank):
    print("up", flush=True)
    rank.wait()

with locked(Path("run")):
    log = open("run/logs/trainer-0.log", "ab")
    waits_for_the_rank(subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=log, stderr=log))
"""
RANK = """
import subprocess, sys, time

def computes_for_ever():
    time.sleep(600)

worker = "import time\\ndef judges(): time.sleep(600)\\njudges()"
subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
computes_for_ever()
"""
START_S = 300


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A driver that waits for a rank, its child, a worker, one log, and a process that does not belong to the run."""
    directory = tmp_path / "run"
    (directory / "logs").mkdir(parents=True)
    (directory / "config.yaml").write_text("run: {name: r}\nschedule: {steps: 1}\n")
    with ExitStack() as stack:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=tmp_path)
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, RANK], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
        )
        for process in (other, driver):
            stack.callback(process.wait)
            stack.callback(process.kill)
        assert driver.stdout is not None and driver.stdout.readline() == b"up\n"
        ends = time.monotonic() + START_S
        while len(family := psutil.Process(driver.pid).children(recursive=True)) < 2:
            assert time.monotonic() < ends
            time.sleep(0.01)
        for process in family:
            stack.callback(process.kill)
        yield directory


def until(directory: Path, *calls: str) -> dict[str, str]:
    """Waits until all of `calls` are in the stacks, and returns the stacks by member."""
    ends = time.monotonic() + START_S
    while True:
        found = {
            stack.member.name.partition(":")[0] + str(number): stack.text
            for number, stack in enumerate(stacks(directory))
        }
        if all(any(call in text for text in found.values()) for call in calls):
            return found
        assert time.monotonic() < ends, found
        time.sleep(0.05)


def test_only_driver_ranks_and_workers_are_found(run):
    found = until(run, "waits_for_the_rank", "computes_for_ever", "judges")
    assert [name.rstrip("0123456789") for name in found] == ["driver", "trainer-", "trainer-"]
    assert "waits_for_the_rank" in found["driver0"]
    text = run_stacks(run)
    assert all(call in text for call in ("waits_for_the_rank", "computes_for_ever", "judges"))


def test_a_process_that_is_stopped_has_its_stack_too(run):
    until(run, "computes_for_ever")
    ranks = [member.pid for member in members(run) if member.name.startswith("trainer-0")]
    (rank,) = (pid for pid in ranks if psutil.Process(pid).children())
    os.kill(rank, signal.SIGSTOP)
    ends = time.monotonic() + START_S
    while psutil.Process(rank).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < ends
    found = {stack.member.pid: stack for stack in stacks(run)}
    assert len(found) == 3 and "computes_for_ever" in found[rank].text


def test_unreadable_processes_are_named_with_the_remedy(run, monkeypatch):
    refusal = subprocess.CompletedProcess([], 1, "", "Error: Operation not permitted (os error 1)")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: refusal)
    assert {stack.found for stack in stacks(run)} == {False}
    assert run_stacks(run).count("SYS_PTRACE") == len(members(run))


async def test_only_passed_deadlines_write_stacks(run):
    notes: list[str] = []
    await keep_stacks(run, notes.append, SlimxError("refused", code="x"))
    await keep_stacks(run, notes.append, ValueError("broken"))
    assert not notes and not (run / "stacks").exists()
    for error in (DeadlineError("the batch", 5, "trainer rank 0"), PartLost("silent", code="rank.silent", about="r")):
        await keep_stacks(run, notes.append, error)
        (file,) = (run / "stacks").iterdir()
        text = file.read_text()
        assert text.startswith(str(error)) and "waits_for_the_rank" in text and str(file) in notes[-1]
        file.unlink()


def test_stacks_of_one_second_have_separate_files_and_old_ones_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 3)
    monkeypatch.setattr(module, "stacks", lambda directory: [])
    files = [module.write_stacks(tmp_path, f"engine e{n}") for n in range(5)]
    assert len(set(files)) == 5 and sorted((tmp_path / "stacks").iterdir()) == files[2:]
    assert [file.read_text().split("\n")[0] for file in files[2:]] == ["engine e2", "engine e3", "engine e4"]


def test_a_run_of_which_nothing_is_here_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {name: r}\nschedule: {steps: 1}\n")
    with refused("stacks.none", about=str(tmp_path)):
        run_stacks(tmp_path)
    with refused("run.none"):
        run_stacks(tmp_path / "absent")
