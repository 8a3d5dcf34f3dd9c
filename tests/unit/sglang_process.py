"""Runs programs in forks of one process that has imported SGLang for the CPU with the models that slimx publishes to,
which takes 10 s of a core.

    python -m tests.unit.sglang_process DESCRIPTOR

DESCRIPTOR is one end of a connection, on which `SGLang` sends one `Job` after the other; each is answered by its exit
status. The process ends with the one that started it, and a program with this one.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from slimx.engines.server.launch import prepare, prepare_imports
from slimx.runtime.process import end_with_parent
from tests.forked import run_and_end

ROOT = Path(__file__).parents[2]
DEADLINE_S = 800.0
"""Seconds for one program, for hangs."""


@dataclass(frozen=True)
class Job:
    """A program as the arguments that Python would be given: ["-m", module, ...] or ["-c", text, ...]."""

    arguments: list[str]
    streams: tuple[Path, Path, Path]
    """Files of its input, output and errors."""
    environment: dict[str, str] = field(default_factory=dict)
    cwd: Path = ROOT


class SGLang:
    """The process that forks; started with the first program."""

    def __init__(self, folder: Path):
        """`folder`: holds the programs' streams, and the code of checkpoints that transformers imports."""
        self.folder = folder
        self._started: tuple[Connection, subprocess.Popen[bytes]] | None = None

    def run(
        self, *arguments: str, stdin: str = "", environment: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` of Python with `arguments`; `environment` is added to that of a server on the CPU, whose
        modules have been imported without it."""
        streams = tuple(self.folder / name for name in ("in", "out", "errors"))
        streams[0].write_text(stdin)
        connection, process = self._process()
        connection.send(Job(list(arguments), streams, dict(environment or {}), cwd))
        try:
            assert connection.poll(DEADLINE_S), f"{arguments[:2]}: not done after {DEADLINE_S} s"
            code = connection.recv()
        except BaseException:
            self.close()
            raise
        return subprocess.CompletedProcess(arguments, code, streams[1].read_text(), streams[2].read_text())

    def close(self) -> None:
        """End the process and what it has forked."""
        if self._started is not None:
            connection, process = self._started
            self._started = None
            connection.close()
            process.kill()
            process.wait()

    def _process(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        if self._started is None:
            connection, theirs = Pipe()
            environment = {
                **os.environ,
                "PYTHONWARNINGS": "ignore",
                "HF_MODULES_CACHE": str(self.folder / "modules"),  # not into the user's own
            }
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            process = subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=[theirs.fileno()])
            theirs.close()
            self._started = connection, process
        return self._started


def main() -> None:
    end_with_parent(os.getppid(), signal.SIGKILL)
    prepare(["--device", "cpu"])
    prepare_imports()
    import sglang.srt.configs.model_config
    import sglang.srt.models.registry
    import sglang.srt.server_args  # noqa: F401

    import slimx.models.families  # noqa: F401

    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError):
        while True:
            job, parent = connection.recv(), os.getpid()
            if (child := os.fork()) == 0:
                connection.close()
                run_and_end(partial(become, job, parent))
            connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def become(job: Job, parent: int) -> None:
    """Run the job in this process as Python would."""
    end_with_parent(parent, signal.SIGKILL)
    written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, flags in enumerate((os.O_RDONLY, written, written)):
        os.dup2(os.open(job.streams[number], flags), number)
    os.environ.update(job.environment)
    os.chdir(job.cwd)
    kind, what, *given = job.arguments
    sys.argv = [what, *given]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, kind, "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
