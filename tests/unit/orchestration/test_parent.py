"""The parent of a driver hands signals on, ends as the driver does, and tells when Ray's library has ended it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slimx.errors import LOST
from tests.processes import lives, wait_for

DRIVER = """
import os, signal, sys
from slimx.orchestration.lifetime.parent import supervised
over = supervised()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
log = open(sys.argv[1], "w", buffering=1)
print(os.getpid(), flush=True)
for line in sys.stdin:
    print(line, file=log)
    for _ in range(2):  # the parent hands them on: before the second it has looked for the log
        signal.sigwait([signal.SIGUSR1])
        print("heard", flush=True)
    exec(sys.argv[2])
"""
RAY = "[2026 W 1 1] connection.cc:216: The connection to the plasma store is failed. Terminate the process. Status: -"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "python-core-driver-01_1.log"


def start(log: Path, ends: str, writes: str = "") -> tuple[subprocess.Popen, psutil.Process]:
    """Starts a driver that writes a line into the log of Ray's library, and after two SIGUSR1 ends by `ends`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    parent = subprocess.Popen([sys.executable, "-c", DRIVER, str(log), ends], text=True, **pipes)
    driver = psutil.Process(int(parent.stdout.readline()))
    print(writes, file=parent.stdin, flush=True)
    return parent, driver


ENDS = {
    "by Ray's library": ("os._exit(1)", RAY, LOST),
    "by a check of Ray's library": ("os.abort()", "[2026 C 1 1] Check failed: status.ok()", LOST),
    "by a mistake of ours": ("sys.exit(1)", "", 1),
    "by a refusal, when Ray is lost too": ("sys.exit(2)", RAY, 2),
    "by another's abort": ("os.abort()", "", -signal.SIGABRT),
    "by os._exit, at once": ("os._exit(0)", "", 2),
    "by os._exit, when all is done": ("over(); os._exit(0)", "", 0),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", RAY, -signal.SIGKILL),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_parent_ends_as_the_driver_does_unless_ray_ended_that(case: str, log: Path) -> None:
    ends, writes, status = ENDS[case]
    log.with_name("raylet.out").write_text("one Ray agent failed, agent_name = runtime_env_agent.\n")
    parent, _ = start(log, ends, writes)
    for _ in range(2):
        parent.send_signal(signal.SIGUSR1)
        assert parent.stdout.readline() == "heard\n"
    _, errors = parent.communicate(timeout=300)
    assert parent.returncode == status
    messages = [line for line in errors.splitlines() if line.startswith("slimx: ")]
    assert len(messages) == (status == LOST or "at once" in case)
    assert all("runtime_env_agent" in line and str(log.parent) in line for line in messages if status == LOST)


def test_a_killed_parent_takes_the_driver_along(log: Path) -> None:
    parent, driver = start(log, "")
    parent.kill()
    parent.communicate(timeout=300)
    wait_for(lambda: not lives(driver))
