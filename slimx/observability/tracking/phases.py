"""Phases of work, timed on concurrent tracks and written to `RUN/timeline.jsonl`, and their placement: lane in the
track, depth inside other phases, time without inner phases."""

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
"""Tolerance of comparisons: unix seconds as floats have a resolution of about 0.2 us."""


@dataclass(kw_only=True, slots=True)
class Phase:
    """One stretch of work, `{"name": "generate", "step": 3, "track": "rollout", "start": 1.7e9, "seconds": 12.5}`."""

    name: str
    step: int | None
    """Step of the work; None for work outside of steps, such as start-up."""
    track: str
    """Name of an independent activity, such as `main` or `rollout`. Phases of one track nest; tracks may overlap."""
    start: float
    """Unix seconds."""
    seconds: float
    detail: str = ""
    """Further information about the phase, such as why a restart was needed."""


@dataclass(kw_only=True, slots=True)
class Placed:
    """A phase with its placement."""

    phase: Phase
    lane: int
    """0 while the phases of a track nest; a phase that overlaps another without nesting is in the next lane."""
    depth: int
    """Number of phases of its lane that contain it."""
    self_seconds: float
    """Seconds without those of directly inner phases; over a lane they add up to the covered time."""


def place(phases: Iterable[Phase]) -> list[Placed]:
    """Places every phase, tracks in the order of their first start, then by start.

    Nesting follows from the times: a phase within another phase of the track is nested in it.
    """
    by_track: dict[str, list[Phase]] = defaultdict(list)
    for phase in sorted(phases, key=lambda phase: (phase.start, -phase.seconds)):
        by_track[phase.track].append(phase)
    placed: list[Placed] = []
    for track in by_track.values():
        placed += _place_track(track)
    return placed


def _place_track(phases: list[Phase]) -> list[Placed]:
    lanes: list[list[Placed]] = []  # per lane, the phases open at the start of the current one, outermost first
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
    """Removes the phases that end before `phase` starts, and returns True if the others contain it."""
    while open_phases and _end(open_phases[-1].phase) <= phase.start + TOLERANCE_SECONDS:
        open_phases.pop()
    return not open_phases or _end(phase) <= _end(open_phases[-1].phase) + TOLERANCE_SECONDS


def _end(phase: Phase) -> float:
    return phase.start + phase.seconds


class Timeline:
    """Times phases with the monotonic clock; usable from several threads and asyncio tasks at once.

    A phase is written when it ends, also by an exception. `resume_step` is that of JsonlFile. If the file can no longer
    be written, the run continues: the failure is reported once and counted by `close`, and `take` stays correct.
    """

    def __init__(
        self, run_dir: Path, *, resume_step: int | None = None, warn: Callable[[str], None] = print_warning
    ) -> None:
        self._file = JsonlFile(run_dir / "timeline.jsonl", resume_step=resume_step)
        self._guard = Guard("timeline.jsonl", warn)
        # One anchor per process keeps order and lengths of phases even if the wall clock is changed.
        self._anchor = time.time() - time.perf_counter()
        self._seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str, *, step: int | None = None, track: str = "main") -> Iterator[None]:
        """Measures the block as a phase. Phases may nest, on one track or across tracks; each has its full length."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.add(Phase(name=name, step=step, track=track, start=self._anchor + start, seconds=seconds))

    def add(self, phase: Phase) -> None:
        """Adds a phase that was timed elsewhere, such as in a trainer's process."""
        with self._lock:
            if phase.step is not None:
                self._seconds[phase.step][phase.name] += phase.seconds
            self._guard.call(lambda: self._file.write(_record(phase)))

    def take(self, step: int) -> dict[str, float]:
        """Returns the seconds of one step by phase name, summed over repeated phases; {} for an unknown step. It and
        earlier steps are then discarded."""
        with self._lock:
            taken = dict(self._seconds.get(step, {}))
            for known in list(self._seconds):
                if known <= step:
                    del self._seconds[known]
        return taken

    def close(self) -> int:
        """Closes the file; returns the number of phases that could not be written."""
        self._file.close()
        return self._guard.failures


def _record(phase: Phase) -> Json:
    """Returns a line of the file, without `detail` if it is empty."""
    record = asdict(phase)
    if not record["detail"]:
        del record["detail"]
    return record
