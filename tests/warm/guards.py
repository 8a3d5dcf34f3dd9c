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
from tests.warm.fork import Fork

SERVER = "slimx.engines.server.launch"


def install(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Has this process, and its forks, start engines by the zygote in `directory`."""

    def start(argv: list[str], **options: Any) -> Any:
        return Guard(directory, argv, **options) if SERVER in argv else subprocess.Popen(argv, **options)

    patch.setattr(process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))


class Guard(Fork):
    """A guard, whose input is a pipe."""

    def __init__(self, directory: Path, argv: list[str], *, stdout: Any, env: dict[str, str], **options: Any):
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        log = stdout.fileno()
        super().__init__(directory, "server", argv[1:], (read, log, log), environment=env, tied=False)
        os.close(read)


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
