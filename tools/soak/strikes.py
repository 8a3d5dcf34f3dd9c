"""Kills random processes of a run at random moments, and measures the time until the run continues."""

from __future__ import annotations

import json
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tools.soak.census import living

GOES_ON = 3
"""Steps after a strike that prove that the run continues: the first may have been in progress."""
WEIGHTS = {
    "engine: scheduler": 2,
    "engine: detokenizer": 2,
    "engine: HTTP server": 2,
    "engine: actor": 2,
    "engine: guard": 2,
    "router": 3,
    "router: guard": 3,
    "reward worker": 3,
    "trainer": 2,
    "driver": 3,
    "Ray: raylet": 1,
    "Ray: GCS": 1,
}
"""Relative frequency of strikes by kind. Kinds whose loss ends the run are rarer, because they take most time."""
DRIVER_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)


@dataclass(slots=True)
class Strike:
    """A killed process, and the run's recovery from it."""

    kind: str
    signum: signal.Signals
    step: int
    at: float
    """Time of the strike, in seconds of the monotonic clock."""
    seconds: float | None = None
    """Seconds until the run had finished `GOES_ON` more steps; None: not yet."""
    ended: bool = False
    """True if the strike ended the run, which was started again."""


class Strikes:
    """Strikes at random intervals of steps. The next one waits until the run has recovered."""

    def __init__(self, every: int, seed: int, file: Path) -> None:
        """Reads earlier strikes. `every`: mean number of steps between two strikes; 0: no strikes. `file`: file with a
        line per strike from which the run recovered, including those of earlier processes of the soak."""
        self.file = file
        lines = [json.loads(line) for line in file.open()] if file.exists() else []
        self.done = [Strike(**{**line, "signum": signal.Signals(line["signum"])}) for line in lines]
        self.every, self.random = every, random.Random(f"{seed} {len(self.done)}")
        self.missing: set[str] = set()
        """Kinds that were chosen for a strike when the run had no such process."""
        self._next: float | None = None
        """Step of the next strike; None: chosen at the next look."""

    def _after(self, step: int) -> float:
        return step + GOES_ON + self.random.expovariate(1 / self.every) if self.every else float("inf")

    @property
    def pending(self) -> Strike | None:
        """Last strike, if the run has not recovered from it yet."""
        return self.done[-1] if self.done and self.done[-1].seconds is None else None

    def look(self, step: int) -> None:
        """Kills a process if a strike is due at `step`, or records that the run has recovered."""
        if self._next is None:
            self._next = self._after(step)
        if self.pending is not None:
            # A run that went on from a checkpoint makes its last steps again first.
            if step >= self.pending.step + GOES_ON:
                self.pending.seconds = time.monotonic() - self.pending.at
                with self.file.open("a") as file:
                    file.write(json.dumps(asdict(self.done[-1])) + "\n")
                self._next = self._after(step)
        elif step >= self._next:
            self._strike(step)

    def _strike(self, step: int) -> None:
        (kind,) = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        victims = [process for found, process in living() if found == kind]
        if not victims:
            self.missing.add(kind)
            self._next = self._after(step)
            return
        signum = self.random.choice(DRIVER_SIGNALS) if kind == "driver" else signal.SIGKILL
        try:
            min(victims, key=lambda process: process.pid).send_signal(signum)
        except psutil.NoSuchProcess:
            return  # it ended in this moment; the next look chooses again
        self.done.append(Strike(kind, signum, step, time.monotonic()))
