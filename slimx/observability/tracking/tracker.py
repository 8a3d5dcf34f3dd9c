"""Tracker of a run: sends each step's metrics and recorded samples to a JSONL file and to every sink.

Sinks are entry points of the group `slimx.sinks`, each named after the key of section `track` that turns it on. The
entry point is a function of a `TrackedRun` and the key's value that returns a `Sink`, or None if the value is off.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import yaml

from slimx import entry_points
from slimx.json_types import Json
from slimx.observability.tracking.guard import Guard, print_warning
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.metrics import StepRecord, flatten
from slimx.observability.tracking.samples import RecordedSample

SINKS = "slimx.sinks"
"""Group of entry points."""


class Tracker:
    """Sends each step's metrics to a JSONL file and to every sink.

    The file (`metrics.jsonl`, one StepRecord per line) is the run's record, which the report reads: `log` raises if it
    fails. Failures of a sink are counted; `warn` gets the first error, and `close` reports the count.
    """

    def __init__(
        self, jsonl: JsonlFile, others: Sequence[Sink] = (), warn: Callable[[str], None] = print_warning
    ) -> None:
        self._jsonl = jsonl
        self._others = [(sink, Guard(sink.name, warn)) for sink in others]
        self._warn = warn
        self._closed = False

    @property
    def removed(self) -> int:
        """Number of lines removed from metrics.jsonl when the run was resumed: later steps, and a torn line."""
        return self._jsonl.removed

    def log(self, step: int, metrics: Mapping[str, object], *, version: int | None = None) -> None:
        """Logs one step's flat or nested `metrics` (see `flatten`). `version`: the current weight version."""
        record = StepRecord(step=step, version=version, time=time.time(), metrics=flatten(metrics))
        self._jsonl.write(record.to_json())
        for sink, guard in self._others:
            guard.call(partial(sink.log, record))

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        """Sends recorded rollouts of one step to every sink; either all or none of them are of an evaluation."""
        if not samples:
            return
        for sink, guard in self._others:
            guard.call(partial(sink.samples, step, samples))

    def close(self) -> dict[str, int]:
        """Closes every sink, and reports and returns the number of failures by sink. Repeated calls are allowed."""
        if not self._closed:
            self._closed = True
            for sink, guard in self._others:
                guard.call(sink.close)
                if guard.failures:
                    self._warn(
                        f"{guard.name} failed {guard.failures} times; metrics.jsonl in the run directory is complete"
                    )
            self._jsonl.close()
        return {guard.name: guard.failures for _, guard in self._others}


def make_tracker(
    run_dir: Path,
    *,
    project: str,
    name: str,
    config: Mapping[str, object],
    resume_step: int | None,
    settings: Mapping[str, object],
    warn: Callable[[str], None] = print_warning,
) -> Tracker:
    """Creates the tracker of one run. Raises SlimxError if a sink cannot start.

    `resume_step`: the next step of a resumed run (0 if it ended before its first checkpoint); None for a new run, which
    refuses a directory with metrics. `config` is sent to every sink. `settings`: values of the keys of section `track`.
    """
    with ExitStack() as undo:  # closes earlier sinks if one cannot start
        run = TrackedRun(run_dir, project, name, config, resume_step)
        others: list[Sink] = []
        for key in entry_points.find(SINKS):
            if key not in settings:
                continue
            sink = entry_points.load(SINKS, key)(run, settings[key])
            if sink is not None:
                others.append(sink)
                undo.callback(sink.close)
        # Last, because it removes lines, which must not happen if a sink refuses.
        jsonl = JsonlFile(run_dir / "metrics.jsonl", resume_step=resume_step)
        undo.pop_all()
    return Tracker(jsonl, others, warn)


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Identity of a run for its sinks."""

    directory: Path
    project: str
    name: str
    config: Mapping[str, object]
    resume_step: int | None = None
    """Next step of a resumed run; None: a new run."""

    def id_in(self, file: str) -> str:
        """Returns the run's id at a service, which is stored in `file` of its directory for resumed runs."""
        path = self.directory / file
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text().strip()

    def named(self, file: str) -> Json:
        """Returns the arguments with which wandb and SwanLab start the run, or resume the one whose id is in `file`."""
        id_ = self.id_in(file)
        return {"project": self.project, "name": self.name, "config": dict(self.config), "id": id_, "resume": "allow"}

    @property
    def yaml(self) -> str:
        """Configuration as YAML."""
        return yaml.safe_dump(dict(self.config), sort_keys=False)


class Sink(Protocol):
    """Destination of step records and samples."""

    name: str

    def log(self, record: StepRecord) -> None: ...

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None: ...

    def close(self) -> None: ...
