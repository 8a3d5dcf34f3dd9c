"""The executable of a session of tests that starts Python programs as forks."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import psutil

from slimx.runtime.user_files import private_directory
from tests.processes import wait_for
from tests.warm.client import LOG

MARK = "SLIMX_TEST_RUN"
"""Variable of every process of a run, by which what it leaves behind is found."""
TEST = "PYTEST_CURRENT_TEST"
"""Pytest's variable with the test that runs."""
PREFIX = "warm-"
"""Prefix of a session's directory."""
ROOT = Path(__file__).parents[2]
OPTIONS = "-IS"
"""Options of the interpreter of a client: nothing of the user's or of the environment's is imported."""
TEXT = """#!{python} {options}
import sys
sys.path.insert(0, {package!r})
from client import main
main({zygotes!r}, {python!r}, sys.argv[1:])
"""


@functools.cache
def interpreter() -> Path:
    """Returns the executable, one for all workers of a session; the first caller starts what stands behind it, which
    ends with the session."""
    worker = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    directory = private_directory() / f"{PREFIX}{worker[:8] if worker else secrets.token_hex(4)}"
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            _start(directory, os.getppid() if worker else os.getpid())
    directory.with_suffix(".lock").unlink(missing_ok=True)
    return directory / "python"


def programs(mark: str) -> list[psutil.Process]:
    """Returns the programs that were forked with this value of `MARK` and have not ended."""
    found = []
    for process, variables in variables_of(interpreter().parent).items():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            if variables.get(MARK) == mark:
                found.append(psutil.Process(process))
    return found


def variables_of(directory: Path) -> dict[int, dict[str, str]]:
    """Returns `MARK` and `TEST` of each forked program by process id; `directory`: that of the executable."""
    found = {}
    for file in (directory / "programs").iterdir():
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # ended, or about to be written
            found[int(file.name)] = json.loads(file.read_text())
    return found


def is_client(process: psutil.Process) -> bool:
    """Returns True for a process that stands for a program."""
    with contextlib.suppress(psutil.Error):
        return OPTIONS in process.cmdline()[1:2]
    return False


def _start(directory: Path, owner: int) -> None:
    (directory / "programs").mkdir(parents=True)
    executable = directory / "python"
    package = str(Path(__file__).parent)
    executable.write_text(TEXT.format(python=sys.executable, options=OPTIONS, zygotes=str(directory), package=package))
    executable.chmod(0o700)
    variables = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.warm.zygote", str(directory), str(executable), str(owner)]
    with (directory / LOG).open("wb") as log:  # a test's standard error is gone when the test is over
        subprocess.Popen(
            command, env=os.environ | variables, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    wait_for((directory / "ready").exists)
