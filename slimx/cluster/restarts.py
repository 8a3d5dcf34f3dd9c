"""Restarts of a run's parts: their limit, and the reason for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slimx.cluster.waiting import first_line
from slimx.config.sections.engines import Health
from slimx.errors import SlimxError

SHOWN = 5
"""Maximum number of restarts listed in the message that ends a run; the timeline has all."""
LONGEST_PAUSE_S = 30.0
"""Longest pause before another start, in seconds; each pause is twice the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One attempt to restart a part."""

    part: str
    """Name of the part in messages: "engine actor-0", "router"."""
    reason: str
    """Reason why the part was lost, or the previous attempt failed."""
    at: float
    """Unix seconds."""
    seconds: float
    error: str = ""
    """Reason why the restart failed; "" if the part is running."""

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.at))
        how = f"failed ({self.error})" if self.error else "succeeded"
        return f"{when} restart of {self.part} after {self.reason!r} {how} in {self.seconds:.0f} s"


class Restarts:
    """Restarts of one part: `health.restarts` in a row, with the count reset after `health.stable_after` seconds of
    service.

    The limit counts restarts in a row and not per time, because a start may take minutes: a part that always dies soon
    after its start is given up, however long its starts take.
    """

    def __init__(
        self,
        part: str,
        health: Health,
        *,
        note: Callable[[str], None],
        record: Callable[[Restart], None] = lambda restart: None,
        pause_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Sets up the count. `note` gets a line when a restart begins or fails, `record` every finished restart.
        `pause_s`: seconds before the second restart in a row. `clock`: monotonic seconds."""
        self.part = part
        self.health = health
        self.note = note
        self.record = record
        self.history: list[Restart] = []
        self.in_row = 0
        self._pause_s = pause_s
        self._clock = clock
        self._serves_since: float | None = None

    @property
    def left(self) -> bool:
        """True if another restart is allowed."""
        return self.in_row < self.health.restarts

    @property
    def pause(self) -> float:
        """Seconds to wait before the next restart: a part that cannot start now may be able to later."""
        return min(LONGEST_PAUSE_S, self._pause_s * 2 ** (self.in_row - 1)) if self.in_row else 0.0

    def serves(self) -> None:
        """Records that the part serves, since now or since earlier."""
        if self._serves_since is None:
            self._serves_since = self._clock()

    def lost(self) -> None:
        """Records that the part has stopped serving."""
        since = self._serves_since
        self._serves_since = None
        if since is not None and self._clock() - since >= self.health.stable_after:
            self.in_row = 0

    @contextmanager
    def attempt(self, reason: SlimxError) -> Iterator[None]:
        """Counts and records one restart, which the block performs."""
        self.in_row += 1
        self.note(f"{self.part}: restart {self.in_row} of {self.health.restarts}")
        at = time.time()
        began = self._clock()

        def keep(error: str) -> None:
            seconds = self._clock() - began
            self.history.append(Restart(part=self.part, reason=first_line(reason), at=at, seconds=seconds, error=error))
            self.record(self.history[-1])

        try:
            yield
        except SlimxError as problem:
            self.note(f"{self.part}: restart {self.in_row} failed: {first_line(problem)}")
            keep(first_line(problem))
            raise
        keep("")


def describe_restarts(restarts: Sequence[Restart]) -> str:
    """Lists the last of these restarts for the message that ends a run; "" if there were none."""
    return "; ".join(map(str, restarts[-SHOWN:]))
