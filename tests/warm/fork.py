"""A program that a zygote has forked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.warm.client import connected, request, status_from


class Fork:
    """A program, with the part of Popen's interface that tests need."""

    def __init__(
        self,
        directory: Path,
        role: str,
        arguments: list[str],
        files: tuple[int, int, int],
        *,
        environment: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        tied: bool,
    ):
        """`directory`: of the zygotes. `arguments`: those of Python. `files`: input, output and errors. `cwd`: its
        directory, this process's by default. `tied`: whether it ends with this process."""
        self._connection: socket.socket = connected(str(directory / role))
        self.pid = request(
            self._connection,
            arguments,
            list(files),
            parent=os.getpid(),
            tied=tied,
            numbers=[0, 1, 2],
            environment=dict(environment),
            directory=cwd,
        )
        self.returncode: int | None = None

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when the program ends."""
        return self._connection.fileno()

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
            self._connection.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
