"""The executable of a session of tests that starts Python programs as forks."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

from slimx.runtime.private import private_directory
from tests.processes import wait_for

ROOT = Path(__file__).parents[2]
TEXT = """#!{python} -IS
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
    directory = private_directory() / f"warm-{worker[:8] if worker else os.getpid()}"
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            _start(directory, os.getppid() if worker else os.getpid())
    directory.with_suffix(".lock").unlink(missing_ok=True)
    return directory / "python"


def _start(directory: Path, owner: int) -> None:
    (directory / "programs").mkdir(parents=True)
    executable = directory / "python"
    package = str(Path(__file__).parent)
    executable.write_text(TEXT.format(python=sys.executable, zygotes=str(directory), package=package))
    executable.chmod(0o700)
    variables = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.warm.zygote", str(directory), str(executable), str(owner)]
    subprocess.Popen(command, env=os.environ | variables, cwd=ROOT, stdin=subprocess.DEVNULL)
    wait_for((directory / "ready").exists)
