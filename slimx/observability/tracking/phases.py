"""Phases of work: timed on concurrent tracks and kept in `RUN/timeline.jsonl`, and the place of each: which lane of its
track, how deep inside other phases, its time without theirs."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimx.observability.tracking.guard import Guard, print_warning
from slimx.observability.tracking.jsonl import JsonlFile

# Unix seconds as floats are good to about 0.2 us: a child may seem to end that much after its parent.
TOLERANCE_SECONDS = 2e-6


@dataclass(kw_only=True, slots=True)
class Phase:
    """One stretch of work, `{"name": "generate", "step": 3, "track": "rollout", "start": 1.7e9, "seconds": 12.5}`."""

    name: str
    step: int | None
    """Step it works for; None for work outside of steps, such as start-up."""
    track: str
    """Name of what runs by itself, such as `main` or `rollout`. Phases of one track nest; tracks overlap freely."""
    start: float
    """Unix seconds."""
    seconds: float
    detail: str = ""
    """Further information about the phase, such as why a restart was needed."""


@dataclass(kw_only=True, slots=True)
class Placed:
    """A phase and its place."""

    phase: Phase
    lane: int
    """0 as long as the phases of a track nest; a phase that overlaps another without nesting moves to the next lane."""
    depth: int
    """Number of phases of its lane that contain it."""
    self_seconds: float
    """Its seconds less those of the phases directly inside: over a lane these add up to the time covered."""


def place(phases: Iterable[Phase]) -> list[Placed]:
    """Places every phase, tracks in the order of their first start, then by start.

    Nesting is read off the times: two phases of one track of which one lies within the other count as nested.
    """
    by_track: dict[str, list[Phase]] = defaultdict(list)
    for phase in sorted(phases, key=lambda phase: (phase.start, -phase.seconds)):
        by_track[phase.track].append(phase)
    return [placed for track in by_track.values() for placed in _place_track(track)]


def _place_track(phases: list[Phase]) -> list[Placed]:
    lanes: list[list[Placed]] = []  # per lane, the phases open at the present one's start, outermost first
    result = []
    for phase in phases:
        lane = next((lane for lane, open_phases in enumerate(lanes) if _fits(phase, open_phases)), len(lanes))
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
    """Drops what ended before `phase` starts, then says whether the rest contains it."""
    while open_phases and _end(open_phases[-1].phase) <= phase.start + TOLERANCE_SECONDS:
        open_phases.pop()
    return not open_phases or _end(phase) <= _end(open_phases[-1].phase) + TOLERANCE_SECONDS


def _end(phase: Phase) -> float:
    return phase.start + phase.seconds


class Timeline:
    """Times phases with the monotonic clock; usable from several threads and asyncio tasks at once.

    A phase is written when it ends, also when it ends by an exception. `resume_step` as in JsonlFile. A file that can
    no longer be written does not stop the run: it is told once, counted by `close`, and `take` stays right.
    """

    def __init__(
        self, run_dir: Path, *, resume_step: int | None = None, warn: Callable[[str], None] = print_warning
    ) -> None:
        self._file = JsonlFile(run_dir / "timeline.jsonl", resume_step=resume_step)
        self._guard = Guard("timeline.jsonl", warn)
        # One anchor for the process: phases keep their order and lengths even if the wall clock is set in between.
        self._anchor = time.time() - time.perf_counter()
        self._seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str, *, step: int | None = None, track: str = "main") -> Iterator[None]:
        """Times the block. Phases may be nested, on one track or across tracks; each counts its whole length."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.add(Phase(name=name, step=step, track=track, start=self._anchor + start, seconds=seconds))

    def add(self, phase: Phase) -> None:
        """Takes in a phase that was timed elsewhere, such as in a trainer's process."""
        with self._lock:
            if phase.step is not None:
                self._seconds[phase.step][phase.name] += phase.seconds
            self._guard.call(lambda: self._file.write(_record(phase)))

    def take(self, step: int) -> dict[str, float]:
        """Seconds by phase name of one step of this process, repeated phases added up; empty for a step unknown. It and
        earlier steps are forgotten."""
        with self._lock:
            taken = dict(self._seconds.get(step, {}))
            for known in [known for known in self._seconds if known <= step]:
                del self._seconds[known]
        return taken

    def close(self) -> int:
        """Closes the file; returns the phases that could not be written to it."""
        self._file.close()
        return self._guard.failures


def _record(phase: Phase) -> dict[str, Any]:
    """A line of the file; most phases have no detail."""
    return {key: value for key, value in asdict(phase).items() if key != "detail" or value}
