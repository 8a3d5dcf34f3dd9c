"""Free space on the disks that a run writes to."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from pathlib import Path

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
        text = f"{self.directory}: {_gib(usage.free)} of {_gib(usage.total)} free"
        if checkpoint:
            text += f", enough for {usage.free // checkpoint} checkpoints of {_gib(checkpoint)}"
        if math.isfinite(hours):
            text += f", full in {hours:.1f} h at the present rate"
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
        since, before = self._free[bisect_left(self._free, (begin, 0))]
        until, after = self._free[bisect_left(self._free, (end, 0))]
        if after >= before:
            return math.inf
        return self._free[-1][1] / (before - after) * (until - since) / 3600

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
        if not path.is_dir():
            continue
        device = os.stat(path).st_dev
        if device not in seen:
            yield Disk(path, directory / "checkpoints" if path == directory else None)
        seen.add(device)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3g} GiB"
