"""Guards of engines (slimx.runtime.process) that are forked, and fork their servers: the tree of processes is that of a
start by exec, but for the guard's parent."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from setproctitle import setproctitle

from slimx.runtime import process
from tests.warm.client import connected, request, status_from

SERVER = "slimx.engines.server.launch"


def install(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Has this process, and its forks, start engines by the zygote in `directory`."""

    def start(argv: list[str], **options: Any) -> Any:
        return Guard(directory, argv, **options) if SERVER in argv else subprocess.Popen(argv, **options)

    patch.setattr(process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))


class Guard:
    """A guard, with the part of Popen's interface that `SupervisedProcess` uses."""

    def __init__(self, directory: Path, argv: list[str], *, stdout: Any, env: dict[str, str], **options: Any):
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        log = stdout.fileno()
        self._connection = connected(str(directory / "server"))
        files = [read, log, log]
        self.pid = request(
            self._connection, argv[1:], files, parent=os.getpid(), tied=False, numbers=[0, 1, 2], environment=env
        )
        os.close(read)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def _wait(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            self._connection.settimeout(seconds)
            try:
                self.returncode = status_from(self._connection.recv(16))
            except (BlockingIOError, TimeoutError):
                return None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_commands(run: Callable[[list[str], dict[str, str]], object]) -> None:
    """Has this process, a guard, fork its command, which `run` runs."""
    start = subprocess.Popen

    def fork(argv: list[str], *, env: dict[str, str], preexec_fn: Callable[[], None]) -> SimpleNamespace:
        command = os.fork()
        if command == 0:
            subprocess.Popen = start
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            preexec_fn()
            setproctitle(" ".join(argv))
            run(argv[1:], dict(env))
        return SimpleNamespace(pid=command)

    subprocess.Popen = fork
