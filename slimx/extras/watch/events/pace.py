"""The time that a phase of a run usually takes, and the time beyond which the run counts as stalled in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

RECENT = 20
"""Earlier times of a phase that its usual time is the median of."""
TAIL_BYTES = 2**20
"""Bytes of timeline.jsonl that are read, about ten thousand phases."""
SILENT_S = 120.0
"""Seconds without a word of the driver after which it hangs: it writes every 2 s."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A phase that goes on, beside its earlier times."""

    phase: str
    seconds: float
    """Seconds that it has gone on for."""
    usual: float | None
    """Median of its last times in this run, seconds; None: it is the first."""
    limit: float
    """Seconds after which the run counts as stalled."""

    @property
    def stalled(self) -> bool:
        return self.seconds > self.limit


def pace(directory: Path, activity: dict[str, Any], now: float, *, factor: float, at_least: float) -> Pace:
    """The pace of the phase that `activity` says, at `now` (Unix seconds). `factor`, `at_least`: of `track.stall`."""
    usual = usual_seconds(directory, activity["phase"])
    return Pace(activity["phase"], now - activity["since"], usual, max(at_least, factor * (usual or 0.0)))


def usual_seconds(directory: Path, phase: str) -> float | None:
    """Median seconds of the last times of a phase of the run in `directory`; None before the first has ended."""
    found: list[float] = []
    for line in reversed(last_lines(directory / "timeline.jsonl", TAIL_BYTES)):
        try:
            each = json.loads(line)
        except ValueError:  # the first of them may be cut
            continue
        if each["name"] == phase and each.get("track", "main") == "main":
            found.append(each["seconds"])
        if len(found) == RECENT:
            break
    return median(found) if found else None


def last_lines(file: Path, nbytes: int) -> list[bytes]:
    """Lines of a file that end in its last `nbytes`, the first of them perhaps cut; none where there is no file."""
    if not file.exists():
        return []
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - nbytes))
        return lines.read().split(b"\n")[:-1]
