"""Runs the steps of a check on a machine one after another, and records for each its expectation, finding and
duration."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]


class Failed(Exception):
    """Raised by a step with an unexpected finding, with one sentence."""


class LeftOut(Exception):
    """Raised by a step that this machine cannot take, with the reason."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step."""

    name: str
    expected: str
    state: Literal["ok", "FAILED", "left out"]
    found: str
    seconds: float


class Steps:
    """Takes steps and writes their outcomes to a file after each."""

    def __init__(self, title: str, path: Path):
        """Starts without outcomes. `title`: first line of the table in the file `path`."""
        self.title, self.path = title, path
        self.outcomes: list[Outcome] = []

    def take(
        self, name: str, work: Callable[[], str | None], *, expected: str = "", needs: Collection[str] = ()
    ) -> None:
        """Takes the step `name`; the result of `work` is its finding, any error of `work` its failure.

        `needs`: steps without which it is left out."""
        began = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        missing = next((step for step in needs if self.state(step) != "ok"), None)
        state: Literal["ok", "FAILED", "left out"]
        if missing is not None:
            state, found = "left out", f"it needs '{missing}'"
        else:
            try:
                state, found = "ok", work() or "ok"
            except LeftOut as reason:
                state, found = "left out", str(reason)
            except Exception as error:  # any error belongs to this step: the others still tell something
                state, found = "FAILED", _sentence(error)
        self.outcomes.append(Outcome(name, expected, state, found, time.monotonic() - began))
        print(f"{state:<8} {name}: {found}", flush=True)
        self.path.write_text(self.table())

    def state(self, name: str) -> str:
        """Returns the state of a step; "" if it was not taken."""
        return next((outcome.state for outcome in self.outcomes if outcome.name == name), "")

    @property
    def failed(self) -> list[str]:
        """Names of the steps that failed."""
        return [outcome.name for outcome in self.outcomes if outcome.state == "FAILED"]

    def summary(self) -> str:
        """Returns which steps failed, in a clause."""
        if not self.failed:
            return f"no step of {len(self.outcomes)} failed"
        return f"{len(self.failed)} of {len(self.outcomes)} steps failed: {', '.join(self.failed)}"

    def table(self) -> str:
        """Returns the outcomes as a table in Markdown."""
        head = [self.title, "", "| step | state | expected | found | s |", "| --- | --- | --- | --- | --- |"]
        rows = (
            (outcome.name, outcome.state, outcome.expected, outcome.found, f"{outcome.seconds:.1f}")
            for outcome in self.outcomes
        )
        return "\n".join([*head, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows), ""])


def run_command(command: Sequence[str], log: Path, seconds: float, env: Mapping[str, str] | None = None) -> str:
    """Runs a command in the project's directory, with all that it prints in the file `log`; returns its last line.

    Raises Failed after `seconds`, and where its exit status is not 0. All processes that it started end with it."""
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, process_group=0)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"not done after {seconds:.0f} s; last: {_last_line(log)}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it has left: ranks, a hung compiler
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = _last_line(log) or f"exit status {status}"
    if status:
        raise Failed(found)
    return found


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
