"""Usual duration of a run's phase, and the duration beyond which the run counts as stalled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

RECENT = 20
"""Number of earlier durations of a phase whose median is its usual duration."""
TAIL_BYTES = 2**20
"""Bytes of timeline.jsonl to read, about ten thousand phases."""
SILENT_S = 120.0
"""Seconds without an update by the driver after which it counts as hanging: it writes every 2 s."""


@dataclass(frozen=True, slots=True)
class PhasePace:
    """A phase in progress, compared with its earlier durations."""

    phase: str
    seconds: float
    """Seconds since the phase began."""
    usual: float | None
    """Median of its last durations in this run, in seconds; None for the first."""
    limit: float
    """Seconds after which the run counts as stalled."""

    @property
    def stalled(self) -> bool:
        return self.seconds > self.limit


def phase_pace(
    directory: Path, activity: Mapping[str, Any], now: float, *, factor: float, at_least: float
) -> PhasePace:
    """Returns the pace of the phase of `activity` at `now` (Unix seconds). `factor`, `at_least`: those of
    `track.stall`."""
    usual = usual_seconds(directory, activity["phase"])
    return PhasePace(activity["phase"], now - activity["since"], usual, max(at_least, factor * (usual or 0.0)))


def usual_seconds(directory: Path, phase: str) -> float | None:
    """Returns the median seconds of the last durations of a phase of the run in `directory`; None before the first has
    ended."""
    durations: list[float] = []
    for line in reversed(last_lines(directory / "timeline.jsonl", TAIL_BYTES)):
        try:
            record = json.loads(line)
        except ValueError:  # the first of them may be cut
            continue
        if record["name"] == phase and record.get("track", "main") == "main":
            durations.append(record["seconds"])
        if len(durations) == RECENT:
            break
    return median(durations) if durations else None


def last_lines(file: Path, nbytes: int) -> list[bytes]:
    """Returns the lines that end in a file's last `nbytes` bytes, the first of them possibly cut; [] without a file."""
    if not file.exists():
        return []
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - nbytes))
        return lines.read().split(b"\n")[:-1]
