"""A process of a server that stays stopped is found; a busy one, and one that goes on in time, is not."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slimx.runtime.process import LOOKS, StopWatch, SupervisedProcess
from tests.processes import wait_for

Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command; it is killed at the end, with its children."""
    started: list[subprocess.Popen] = []

    def popen(*argv: str) -> subprocess.Popen:
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield popen
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def stop(pid: int) -> psutil.Process:
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
    return process


def looks(watch: StopWatch, count: int) -> list[list[psutil.Process]]:
    return [watch.look() for _ in range(count)]


def test_a_descendant_found_stopped_several_times_in_a_row_is_lost(start: Start) -> None:
    child, busy = start("sleep", "600"), start("sh", "-c", "while :; do :; done")
    watch = StopWatch(os.getpid(), os.getppid())
    process = stop(child.pid)
    assert looks(watch, LOOKS - 1) == [[]] * (LOOKS - 1)
    process.resume()
    wait_for(lambda: process.status() != psutil.STATUS_STOPPED)
    assert watch.look() == []
    stop(child.pid)
    assert looks(watch, LOOKS) == [*[[]] * (LOOKS - 1), [process]]
    assert busy.poll() is None


@pytest.mark.slow("the looks of a guard")
def test_a_server_that_stays_stopped_is_killed_with_the_reason(tmp_path: Path) -> None:
    process = SupervisedProcess("server", ["sleep", "600"], tmp_path / "server.log")
    process.start()
    try:
        guard = psutil.Process(process.pid)
        wait_for(guard.children)
        stop(guard.children()[0].pid)
        wait_for(lambda: process.poll() is not None, 30)
        assert process.poll() == 128 + signal.SIGSTOP and "dmesg" not in str(process.ended())
    finally:
        process.stop(0)


def test_an_owner_counts_only_as_a_worker_of_ray_whose_raylet_runs(start: Start, tmp_path: Path) -> None:
    for name, found in (("raylet", True), ("driver", False)):
        (tmp_path / name).symlink_to("/bin/sh")
        parent = start(str(tmp_path / name), "-c", "sleep 600 & echo $!; wait")
        owner = int(parent.stdout.readline())
        # The guard, which has no descendants here.
        watch = StopWatch(owner, owner)
        process = stop(owner)
        assert looks(watch, LOOKS)[-1] == [process] * found, name
        stop(parent.pid)
        assert looks(watch, LOOKS)[-1] == [], "with its raylet the whole run is stopped"
