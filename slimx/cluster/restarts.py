"""Restarts of engines and routers: how many are allowed, and the reason for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slimx.config.sections.engines import Health
from slimx.errors import SlimxError, duration, first_line

SHOWN = 5
"""Maximum number of restarts listed in the error that ends a run; the timeline contains all of them."""
LONGEST_PAUSE_S = 30.0
"""Longest pause before a restart, in seconds. Each pause is twice as long as the one before, up to this limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One attempt to restart an engine or router."""

    part: str
    """Name of the restarted part in messages, such as "engine actor-0" or "router"."""
    reason: str
    """Reason why the engine or router was lost, or why the previous attempt failed."""
    at: float
    """Unix time, in seconds, at which the attempt started."""
    seconds: float
    error: str = ""
    """Reason why the restart failed; "" if it succeeded."""

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S UTC", time.gmtime(self.at))
        # Messages end with a remedy after a semicolon, which would be repeated for every restart.
        reason, error = (message.partition("; ")[0] for message in (self.reason, self.error))
        how = f"failed ({error})" if error else "succeeded"
        return f"{when} restart of {self.part} after {reason!r} {how} in {duration(self.seconds)}"


class Restarts:
    """Restarts of one engine or router. Up to `health.restarts` consecutive restarts are allowed, and
    `health.stable_after` seconds of service reset the count.

    The limit counts consecutive restarts, not restarts per unit of time, because a start may take minutes: an engine
    that always dies soon after its start is abandoned, however long its starts take."""

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
        """Creates the record of a part that has not been restarted yet.

        `part`: name in messages. `note`: receives a line of text when a restart starts or fails. `record`: receives
        every finished restart. `pause_s`: seconds to wait before the second consecutive restart. `clock`: function that
        returns monotonic seconds."""
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
        """True if `health.restarts` allows another restart of the engine or router."""
        return self.in_row < self.health.restarts

    @property
    def pause(self) -> float:
        """Seconds to wait before the next restart, so that a temporary problem can clear; 0 before the first
        restart."""
        return min(LONGEST_PAUSE_S, self._pause_s * 2 ** (self.in_row - 1)) if self.in_row else 0.0

    def serves(self) -> None:
        """Records that the engine or router is serving. Its time in service counts from the first call after a start or
        after `lost`."""
        if self._serves_since is None:
            self._serves_since = self._clock()

    def lost(self) -> None:
        """Records that the engine or router has stopped serving, and resets the count of restarts if it had served for
        at least `health.stable_after` seconds."""
        since = self._serves_since
        self._serves_since = None
        if since is not None and self._clock() - since >= self.health.stable_after:
            self.in_row = 0

    @contextmanager
    def attempt(self, reason: SlimxError) -> Iterator[None]:
        """Counts the restart that the `with` block performs, and records whether it succeeds. `reason`: error that
        describes the loss of the engine or router."""
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
            error = first_line(problem)
            self.note(f"{self.part}: restart {self.in_row} failed: {error}")
            keep(error)
            raise
        keep("")


def describe_restarts(health: Health, restarts: Sequence[Restart]) -> str:
    """Returns the limit on restarts and a description of the last `SHOWN` of `restarts`, for the error that ends a
    run."""
    limit = f"rollout.health.restarts is {health.restarts}: {'; '.join(map(str, restarts[-SHOWN:]))}"
    return limit.removesuffix(": ")
