"""Restarts of a run's parts: how many are allowed, and why each was needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slimx.cluster.waiting import first_line
from slimx.config.sections.engines import Health
from slimx.errors import SlimxError

TOLD = 5
"""Restarts that the message which ends a run tells, at most; the timeline has all."""
LONGEST_PAUSE_S = 30.0
"""Seconds before another start, at most: each pause is twice the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One attempt to start a part again."""

    part: str
    """Name of the part in messages: "engine actor-0", "router"."""
    reason: str
    """Reason for which the part was lost, or the attempt before failed."""
    at: float
    """Unix seconds."""
    seconds: float
    error: str = ""
    """Reason for which the restart failed; "" if the part runs."""

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.at))
        how = f"failed ({self.error})" if self.error else "succeeded"
        return f"{when} restart of {self.part} after {self.reason!r} {how} in {self.seconds:.0f} s"


class Restarts:
    """The restarts of one part: `health.restarts` in a row, all of them again once it has served for
    `health.stable_after` seconds.

    Counted in a row and not in a stretch of time, as starts may take minutes: a part that always dies soon after its
    start is given up, however long its starts take.
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
        """`note` is told in one line when a restart begins or fails, `record` of each that has ended. `pause_s`:
        seconds before the second restart in a row. `clock`: monotonic seconds."""
        self.part, self.health, self.note, self.record = part, health, note, record
        self.history: list[Restart] = []
        self.in_row = 0
        self._pause_s, self._clock = pause_s, clock
        self._serves_since: float | None = None

    @property
    def left(self) -> bool:
        return self.in_row < self.health.restarts

    @property
    def pause(self) -> float:
        """Seconds to wait before the next one: a part that cannot start at this moment may be able to later."""
        return min(LONGEST_PAUSE_S, self._pause_s * 2 ** (self.in_row - 1)) if self.in_row else 0.0

    def serves(self) -> None:
        """The part serves, from now on or as before."""
        if self._serves_since is None:
            self._serves_since = self._clock()

    def lost(self) -> None:
        """The part serves no more."""
        since, self._serves_since = self._serves_since, None
        if since is not None and self._clock() - since >= self.health.stable_after:
            self.in_row = 0

    @contextmanager
    def attempt(self, reason: SlimxError) -> Iterator[None]:
        """One restart, which the block does."""
        self.in_row += 1
        self.note(f"{self.part}: restart {self.in_row} of {self.health.restarts}")
        at, began = time.time(), self._clock()

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


def told_of(restarts: Sequence[Restart]) -> str:
    """The last of these restarts, for the message that ends a run; "" if there were none."""
    return "; ".join(map(str, restarts[-TOLD:]))
