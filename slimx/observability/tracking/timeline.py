"""The timeline of a run: named phases of a step, on concurrent tracks, kept in `RUN/timeline.jsonl`."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slimx.observability.tracking.guard import Guard, print_warning
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.phases import Phase


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
