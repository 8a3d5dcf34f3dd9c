"""Free space on the disks that a run writes to."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from slimx.errors import counted, duration
from slimx.extras.alerts.finding import Finding
from slimx.orchestration.state.saves import Saves

GIB = 2**30
LEAST = 2 * GIB
"""Free bytes below which a disk is nearly full; on disks smaller than 40 GiB, a twentieth of the disk."""
CHECKPOINTS = 1.2
"""Multiple of the newest checkpoint's size below which the free space on the disk of the checkpoints is too small."""
HOURS = 2.0
"""Hours until the disk is full, at the rate at which free space falls, below which the disk is nearly full."""
RATE_S = (1800.0, 3600.0)
"""Shortest and longest time in seconds over which that rate is measured. It is the slowest of the rates in the first
half of this time, in its second half, and in the last `RECENT_S` seconds, so that caches that a start fills, and a
single checkpoint, are not extrapolated."""
RECENT_S = 300.0
FAST_HOURS = 0.5
"""Hours until the disk is full, at the slowest of the rates in each of the last 5 minutes, below which the disk is
nearly full even if the rate is new. A burst of writing that is over, or that wrote no more than a checkpoint in the
last half hour, is not extrapolated."""
MINUTE_S = 60.0
"""Shortest duration in seconds over which one of these rates is measured."""


class Disk:
    """Disk that contains a directory, with its free space during the last hour."""

    def __init__(self, directory: Path, checkpoints: Path | None = None) -> None:
        """Stores the directory, and the directory of the run's checkpoints if it is on this disk."""
        self.directory = directory
        self._checkpoints = checkpoints
        self._sizes: dict[Path, int] = {}
        self._free: deque[tuple[float, int]] = deque()
        """Times and free bytes of the looks during the last hour."""

    def look(self, now: float) -> Finding:
        """Returns the finding about the free space at time `now`. Raises OSError if the disk cannot be queried."""
        usage = shutil.disk_usage(self.directory)
        self._free.append((now, usage.free))
        while now - self._free[0][0] > RATE_S[1]:
            self._free.popleft()
        checkpoint = self._checkpoint()
        limit = max(min(LEAST, usage.total // 20), CHECKPOINTS * checkpoint)
        oldest = self._free[0][0]
        hours = of_last_hour = math.inf
        if now - oldest >= RATE_S[0]:
            middle = (oldest + now) / 2
            of_last_hour = self._hours(oldest, now)
            hours = max(self._hours(oldest, middle), self._hours(middle, now), self._hours(now - RECENT_S, now))
            before = self._before(now - RATE_S[0])[1]
            fast = self._hours_of_minutes(now)
            if fast < FAST_HOURS and before - usage.free > CHECKPOINTS * checkpoint:
                hours = min(hours, fast)
        text = f"{_gib(usage.free)} of {_gib(usage.total)} free"
        if checkpoint:
            text += f", enough for {counted(usage.free // checkpoint, 'checkpoint')} of {_gib(checkpoint)}"
        if math.isfinite(hours):
            text += f", full in {duration(hours * 3600)} at the present rate"
        return Finding(
            name="disk",
            about=str(self.directory),
            bad=usage.free < limit or hours < HOURS,
            good=usage.free > 1.5 * limit and of_last_hour > 2 * HOURS,
            text=text,
            value=usage.free / GIB,
            usual=f"at least {_gib(limit)}",
        )

    def _hours(self, begin: float, end: float) -> float:
        """Returns the hours until the disk is full if its free space falls as between the times `begin` and `end`;
        infinity if it has not fallen."""
        since, before = self._before(begin)
        until, after = self._free[bisect_left(self._free, (end, 0))]
        if after >= before:
            return math.inf
        return self._free[-1][1] / (before - after) * (until - since) / 3600

    def _hours_of_minutes(self, now: float) -> float:
        """Returns the hours until the disk is full at the slowest rate of parts of the last `RECENT_S` seconds, which
        last a minute, or longer if looks are farther apart."""
        hours = 0.0
        end = now
        while end > now - RECENT_S:
            begin, _ = self._before(end - MINUTE_S)
            hours = max(hours, self._hours(begin, end))
            end = begin
        return hours

    def _before(self, at: float) -> tuple[float, int]:
        """Returns time and free bytes of the last look at or before the time `at`, or of the first look."""
        return self._free[max(0, bisect_right(self._free, (at, math.inf)) - 1)]

    def _checkpoint(self) -> int:
        """Returns the size of the newest checkpoint in bytes; 0 if there is none."""
        newest = None if self._checkpoints is None else Saves(self._checkpoints, keep=1).newest()
        if newest is None:
            return 0
        if newest not in self._sizes:
            self._sizes = {newest: sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())}
        return self._sizes[newest]


def disks_of(directory: Path) -> Iterator[Disk]:
    """Yields the disks of the run's directory, of temporary files, which include Ray's, and of shared memory; each disk
    once."""
    seen = set()
    for path in (directory, Path(tempfile.gettempdir()), Path("/dev/shm")):
        try:
            device = os.stat(path).st_dev
        except OSError:  # it is missing, or another process has removed it
            continue
        if device not in seen:
            yield Disk(path, directory / "checkpoints" if path == directory else None)
        seen.add(device)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3g} GiB"
