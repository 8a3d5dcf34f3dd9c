"""The Python stacks of the processes that a test started, for what it says when it has waited in vain."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

FOLDER = "SLIMX_TEST_STACKS"
"""Environment variable: the directory in which every Python process of this session opens the file that is named by
its id (tests/in_every_process/sitecustomize.py)."""
ASK = signal.SIGRTMAX - 1
ANSWER_S = 3.0
"""Seconds that processes have for their answers; one that is stopped gives none."""
SETTLED_S = 0.1
"""An answer that has not grown for so long is complete."""


def install() -> None:
    """Lets every Python process that this one starts from here on be asked where it is."""
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="slimx-test-stacks-")
    hook = str(Path(__file__).parent / "in_every_process")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([hook, *(path for path in paths if path and path != hook)])


def remove() -> None:
    """Removes the files of the answers; processes that begin later open none."""
    shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


def collect(pids: Iterable[int] | None = None) -> str:
    """Asks each process where it is: by default all that live of those which this session started.

    Each thread's innermost call comes first. A process that is not Python, or silent, is named without a stack.
    """
    import psutil  # tests of a GPU run without it, as long as none hangs

    folder = Path(os.environ[FOLDER])
    if pids is None:
        pids = sorted(int(file.name) for file in folder.iterdir())
    requests: dict[Path, tuple[int, str]] = {}  # the bytes of earlier answers, and who it is
    for pid in pids:
        file = folder / str(pid)
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            requests[file] = _size(file), f"--- process {pid}: {' '.join(process.cmdline())[-200:]}"
            if file.exists():  # else the signal would end it
                process.send_signal(ASK)
        except psutil.NoSuchProcess:
            continue
    end, sizes = time.monotonic() + ANSWER_S, {}
    while time.monotonic() < end:
        before, sizes = sizes, {file: _size(file) for file in requests}
        if sizes == before and all(size > requests[file][0] for file, size in sizes.items() if file.exists()):
            break
        time.sleep(SETTLED_S)
    return "\n".join(f"{who}\n{_answer(file, begin)}" for file, (begin, who) in requests.items())


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _answer(file: Path, begin: int) -> str:
    text = file.read_bytes()[begin:].decode(errors="replace") if file.exists() else ""
    return text or "  (no answer: not Python, or stopped)\n"
