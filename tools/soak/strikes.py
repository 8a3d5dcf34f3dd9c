"""Strikes against a run: random processes are killed at random moments, and the time until it goes on is measured."""

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
"""Steps after a strike that show that the run goes on: the first may have been under way."""
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
"""Frequency of strikes by kind, relative to each other. Those that end the run cost most time."""
DRIVER_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)


@dataclass(slots=True)
class Strike:
    """A process that was killed, and what came of it."""

    kind: str
    signum: signal.Signals
    step: int
    at: float
    """Seconds of the monotonic clock."""
    seconds: float | None = None
    """Until the run had made `GOES_ON` more steps; None: it has not yet."""
    ended: bool = False
    """True if the run ended by it and was started again."""


class Strikes:
    """Strikes at random distances of steps, one after the other: the next waits until the run goes on."""

    def __init__(self, every: int, seed: int, file: Path) -> None:
        """`every`: steps between two strikes on average; 0: none. `file`: a line for each strike that was recovered
        from, also of an earlier process of the soak."""
        self.file = file
        lines = [json.loads(line) for line in file.open()] if file.exists() else []
        self.done = [Strike(**{**line, "signum": signal.Signals(line["signum"])}) for line in lines]
        self.every, self.random = every, random.Random(f"{seed} {len(self.done)}")
        self.missing: set[str] = set()
        """Kinds that were to be struck when the run had none."""
        self._next: float | None = None
        """Step of the next strike; None: it is drawn at the first look."""

    def _after(self, step: int) -> float:
        return step + GOES_ON + self.random.expovariate(1 / self.every) if self.every else float("inf")

    @property
    def pending(self) -> Strike | None:
        """The strike from which the run has not recovered yet."""
        return self.done[-1] if self.done and self.done[-1].seconds is None else None

    def look(self, step: int) -> None:
        """Strike if it is time for it at `step`, or see that the run has gone on."""
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
