"""What ran when: named phases of a step, on concurrent tracks, kept in `RUN/timeline.jsonl`."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from slimx.errors import SlimxError
from slimx.observability.tracking.guard import Guard, print_warning
from slimx.observability.tracking.jsonl import JsonlFile, load_records
from slimx.observability.tracking.phases import Phase, place


class Timeline:
    """Times phases with the monotonic clock; usable from several threads and asyncio tasks at once.

    A phase is written when it ends, also when it ends by an exception. `resume_step` as in JsonlFile. A file that can
    no longer be written does not stop the run: it is told once, counted by `close`, and `seconds` stays right.
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

    def seconds(self, step: int) -> dict[str, float]:
        """Seconds by phase name of one step of this process, repeated phases added up; empty for a step unknown."""
        with self._lock:
            return dict(self._seconds.get(step, {}))

    def to_chrome_trace(self, path: Path) -> None:
        """Writes every phase of the file, earlier processes of the run included, for chrome://tracing or Perfetto."""
        phases, problems = load_records(self._file.path, Phase.from_json)
        if problems:
            raise SlimxError(f"{problems[0]}; repair the line, then export the trace")
        path.write_bytes(msgspec.json.encode(chrome_trace(phases)))

    def close(self) -> int:
        """Closes the file; returns the phases that could not be written to it."""
        self._file.close()
        return self._guard.failures


def _record(phase: Phase) -> dict[str, Any]:
    """A line of the file; most phases have no detail."""
    return {key: value for key, value in asdict(phase).items() if key != "detail" or value}


def chrome_trace(phases: list[Phase]) -> dict[str, Any]:
    """The phases as a Chrome trace object: one thread per track and lane, microseconds since the first start.

    Format: "Trace Event Format" of the Chromium project, complete (`X`) and metadata (`M`) events.
    """
    origin = min((phase.start for phase in phases), default=0.0)
    threads: dict[tuple[str, int], int] = {}
    events: list[dict[str, Any]] = []
    for placed in place(phases):
        phase = placed.phase
        thread = threads.setdefault((phase.track, placed.lane), len(threads))
        events.append(
            {
                "name": phase.name,
                "cat": "phase",
                "ph": "X",
                "ts": (phase.start - origin) * 1e6,
                "dur": phase.seconds * 1e6,
                "pid": 0,
                "tid": thread,
                "args": {"step": phase.step} | ({"detail": phase.detail} if phase.detail else {}),
            }
        )
    for (track, lane), thread in threads.items():
        label = track if lane == 0 else f"{track} ({lane + 1})"
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": label}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_unix_seconds": origin}}
