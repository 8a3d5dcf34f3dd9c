"""Runs sessions of pytest side by side, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimx.runtime.process import adopt_orphans, kill_descendants

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
GRACE_S = 60.0
"""Seconds that sessions get after Ctrl-C to tear down their fixtures."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, the same as a shell's."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session of pytest, or another command that writes the same kind of counts."""

    name: str
    command: Sequence[str]
    counts: Path
    """File into which the command writes its counts (tools/rings/counting.py)."""
    output: Path | None = None
    """File for the command's output, which is shown at the end; None: shown at once."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a session."""

    name: str
    status: int
    seconds: float
    files: dict[str, Counter[str]] = field(default_factory=dict)
    """Passed, failed, skipped and seconds by file."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of slow tests that did not run, by directory."""

    def total(self, key: str) -> int:
        return sum(int(counts.get(key, 0)) for counts in self.files.values())


def pytest_session(name: str, seed: int, arguments: Sequence[str], *, at_end: bool = False) -> Session:
    """Returns a session of pytest in random order. `at_end`: True to print its output in one piece at its end."""
    counts = BUILD / f"{name}-counts.json"
    plugin = ["-p", "tools.rings.counting", f"--counts={counts}", f"--randomly-seed={seed}"]
    command = [sys.executable, "-m", "pytest", *plugin, *arguments]
    return Session(name, command, counts, BUILD / f"{name}-tests.txt" if at_end else None)


def run(sessions: Sequence[Session]) -> list[Outcome]:
    """Runs all sessions at once and returns their outcomes.

    Raises KeyboardInterrupt after Ctrl-C, SIGTERM or SIGHUP, once every process that a session started has ended.
    """
    adopt_orphans()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    ended: dict[str, float] = {}
    began = time.monotonic()
    try:
        for session in sessions:
            session.counts.parent.mkdir(parents=True, exist_ok=True)
            session.counts.unlink(missing_ok=True)
            processes[session.name] = _start(session)
        while len(ended) < len(sessions):
            for name, process in processes.items():
                if name not in ended and process.poll() is not None:
                    ended[name] = time.monotonic() - began
            time.sleep(0.1)
    except KeyboardInterrupt:
        _interrupt(list(processes.values()))
        raise
    finally:
        kill_descendants(os.getpid())
        for session in sessions:
            if session.output is not None and session.output.exists():
                print(f"\n{session.output.read_text(errors='replace')}", flush=True)
    return [_outcome(session, processes[session.name].returncode, ended[session.name]) for session in sessions]


def _start(session: Session) -> subprocess.Popen[bytes]:
    # In a process group of its own, Ctrl-C reaches this process alone, which ends the sessions in order.
    with contextlib.ExitStack() as stack:
        output = None if session.output is None else stack.enter_context(session.output.open("wb"))
        error = None if output is None else subprocess.STDOUT
        return subprocess.Popen(
            session.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=error, process_group=0
        )


def _interrupt(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Lets sessions tear down their fixtures; a second Ctrl-C ends the wait."""
    with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        deadline = time.monotonic() + GRACE_S
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))


def _outcome(session: Session, status: int, seconds: float) -> Outcome:
    if not session.counts.exists():  # it did not come to its end
        return Outcome(session.name, status, seconds)
    counts = json.loads(session.counts.read_text())
    files = {file: Counter(row) for file, row in counts["files"].items()}
    return Outcome(session.name, status, seconds, files, Counter(counts["left_out"]))
