"""Usual duration of a run's phases, and the duration after which a phase counts as stalled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from slimx.extras.alerts.lines import last_lines

RECENT = 20
"""Number of most recent durations of a phase whose median counts as the phase's usual duration."""
TAIL_BYTES = 2**20
"""Number of bytes that are read from the end of timeline.jsonl; they contain about ten thousand phases."""
SILENT_S = 120.0
"""Seconds without an update by the driver after which the run counts as stalled. The driver writes an update every 2
s."""


@dataclass(frozen=True, slots=True)
class PhasePace:
    """Duration so far of a phase in progress, and its usual duration."""

    phase: str
    seconds: float
    """Seconds since the phase started."""
    usual: float | None
    """Median of the phase's last `RECENT` durations in this run, in seconds; None if the phase has not ended before."""
    limit: float
    """Number of seconds after which the phase counts as stalled."""

    @property
    def stalled(self) -> bool:
        return self.seconds > self.limit


def phase_pace(
    directory: Path, activity: Mapping[str, Any], now: float, *, factor: float, at_least: float
) -> PhasePace:
    """Returns the pace, at time `now` (Unix seconds), of the phase that `activity` describes. `factor` and `at_least`:
    settings of `track.stall`, which determine the pace's `limit`."""
    usual = usual_seconds(directory, activity["phase"])
    return PhasePace(activity["phase"], now - activity["since"], usual, max(at_least, factor * (usual or 0.0)))


def usual_seconds(directory: Path, phase: str) -> float | None:
    """Returns the median in seconds of the last `RECENT` durations of a phase in the run in `directory`; None if the
    phase has not ended before."""
    durations: list[float] = []
    for line in reversed(last_lines(directory / "timeline.jsonl", TAIL_BYTES)):
        try:
            record = json.loads(line)
        except ValueError:  # the first line may be incomplete
            continue
        if record["name"] == phase and record.get("track", "main") == "main":
            durations.append(record["seconds"])
        if len(durations) == RECENT:
            break
    return median(durations) if durations else None
