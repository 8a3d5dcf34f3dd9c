"""Processes that are stopped are ended; others that got their number are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slimx.extras.recovery import kill_workers
from slimx.extras.recovery.kill_workers import kill_on_nodes
from tests.refusals import refused

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A worker of Ray's by its command line, and another process."""
    several = [subprocess.Popen([name, "-c", SLEEP], executable=sys.executable) for name in ("ray::Rank", "python")]
    yield several
    for process in several:
        process.kill()
        process.wait()


async def test_a_stopped_worker_is_ended_and_a_stranger_is_left_alone(processes) -> None:
    worker, stranger = processes
    worker.send_signal(signal.SIGSTOP)
    await kill_on_nodes({None: [worker.pid, stranger.pid]}, "the lost trainers")
    assert worker.wait() == -signal.SIGKILL and stranger.poll() is None
    await kill_on_nodes({None: [worker.pid]}, "the lost trainers")


async def test_a_worker_that_does_not_end_is_named(processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_workers, "END_S", 0.1)
    monkeypatch.setattr(os, "kill", lambda pid, signum: None)
    with refused("rank.held", about="the lost trainers"):
        await kill_on_nodes({None: [processes[0].pid]}, "the lost trainers")
