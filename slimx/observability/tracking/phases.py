"""Phases of a run, such as generating and training, timed on concurrent tracks and written to `RUN/timeline.jsonl`.
Also computes, for a run's report, how phases are nested."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from slimx.json_types import Json
from slimx.observability.tracking.guard import Guard, print_warning
from slimx.observability.tracking.jsonl import JsonlFile

TOLERANCE_SECONDS = 2e-6
"""Tolerance for comparing times, in seconds: Unix times as floats have a resolution of about 0.2 us."""


@dataclass(kw_only=True, slots=True)
class Phase:
    """A period of work on a track, stored as one line of timeline.jsonl: `{"name": "generate", "step": 3, "track":
    "rollout", "start": 1.7e9, "seconds": 12.5}`."""

    name: str
    step: int | None
    """Step that the work belongs to; None for work outside of steps, such as startup."""
    track: str
    """Name of the activity that the work belongs to, such as `main` or `rollout`. Phases of one track are normally
    nested or disjoint; phases of different tracks may overlap."""
    start: float
    """Unix time at which the phase started, in seconds."""
    seconds: float
    detail: str = ""
    """Additional information about the phase, such as the reason for a restart; "" if there is none."""


@dataclass(kw_only=True, slots=True)
class Placed:
    """A phase and its nesting level within its track, as a report draws it."""

    phase: Phase
    lane: int
    """Number of the track's lane in which the phase is drawn: 0, or a higher number if the phase partly overlaps phases
    in every lower lane."""
    depth: int
    """Number of phases in the same lane of the track that contain this phase."""
    self_seconds: float
    """Duration in seconds, excluding the phases nested directly in this one. The sum over all phases in one lane of a
    track is the total time that these phases cover."""


def place(phases: Iterable[Phase]) -> list[Placed]:
    """Computes the nesting of all phases. Returns the phases track by track, in the order in which the tracks start,
    and within a track by start time. A phase is nested in another phase of the same track if it takes place entirely
    during that phase."""
    by_track: dict[str, list[Phase]] = defaultdict(list)
    for phase in sorted(phases, key=lambda phase: (phase.start, -phase.seconds)):
        by_track[phase.track].append(phase)
    placed: list[Placed] = []
    for track in by_track.values():
        placed += _place_track(track)
    return placed


def _place_track(phases: list[Phase]) -> list[Placed]:
    lanes: list[
        list[Placed]
    ] = []  # for each lane, the phases that have not ended when the current one starts, outermost first
    result = []
    for phase in phases:
        lane = 0
        while lane < len(lanes) and not _fits(phase, lanes[lane]):
            lane += 1
        if lane == len(lanes):
            lanes.append([])
        open_phases = lanes[lane]
        placed = Placed(phase=phase, lane=lane, depth=len(open_phases), self_seconds=phase.seconds)
        if open_phases:
            parent = open_phases[-1]
            parent.self_seconds = max(0.0, parent.self_seconds - phase.seconds)
        open_phases.append(placed)
        result.append(placed)
    return result


def _fits(phase: Phase, open_phases: list[Placed]) -> bool:
    """Removes from `open_phases`, the unfinished phases of a lane, those that end before `phase` starts. Returns True
    if the remaining phases contain `phase` completely."""
    while open_phases and _end(open_phases[-1].phase) <= phase.start + TOLERANCE_SECONDS:
        open_phases.pop()
    return not open_phases or _end(phase) <= _end(open_phases[-1].phase) + TOLERANCE_SECONDS


def _end(phase: Phase) -> float:
    return phase.start + phase.seconds


class Timeline:
    """Times phases with a monotonic clock. May be used from several threads and asyncio tasks at the same time.

    A phase is written when it ends, even if an exception ends it. `resume_step`: first step of a resumed run, which
    writes the phases of this and later steps again (see `JsonlFile`); None for a new run. If the file cannot be written
    any more, the run continues: the first failure is reported, `close` returns the number of failures, and `take` stays
    correct."""

    def __init__(
        self, run_dir: Path, *, resume_step: int | None = None, warn: Callable[[str], None] = print_warning
    ) -> None:
        self._file = JsonlFile(run_dir / "timeline.jsonl", resume_step=resume_step)
        self._guard = Guard("timeline.jsonl", warn)
        # With one offset per process, order and durations stay correct even if the system clock is changed.
        self._anchor = time.time() - time.perf_counter()
        self._seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str, *, step: int | None = None, track: str = "main") -> Iterator[None]:
        """Measures the duration of the `with` block as phase `name`. Phases may be nested, on one track or on several;
        the duration of a phase includes the phases nested in it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.add(Phase(name=name, step=step, track=track, start=self._anchor + start, seconds=seconds))

    def add(self, phase: Phase) -> None:
        """Adds a phase that was timed elsewhere, such as a restart."""
        with self._lock:
            if phase.step is not None:
                self._seconds[phase.step][phase.name] += phase.seconds
            self._guard.call(lambda: self._file.write(_record(phase)))

    def take(self, step: int) -> dict[str, float]:
        """Returns the duration in seconds of each phase of step `step`, by phase name and summed over repetitions; {}
        for an unknown step. Discards the phases of this and earlier steps."""
        with self._lock:
            taken = dict(self._seconds.get(step, {}))
            for known in list(self._seconds):
                if known <= step:
                    del self._seconds[known]
        return taken

    def close(self) -> int:
        """Closes the file, and returns the number of phases that could not be written."""
        self._file.close()
        return self._guard.failures


def _record(phase: Phase) -> Json:
    """Returns the JSON object of `phase` for timeline.jsonl, without `detail` if it is empty."""
    record = asdict(phase)
    if not record["detail"]:
        del record["detail"]
    return record
