"""Tracker of a run, which sends the metrics and recorded samples of each step to a JSONL file and to sinks.

A sink, such as a tracking service, is an entry point of the group `slimx.sinks`. Its name is the key in section `track`
that enables the sink. The entry point is a function that receives a `TrackedRun` and the value of the key, and returns
a `Sink`, or None if the value disables it.
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
"""Entry-point group for the functions that create tracking sinks."""


class Tracker:
    """Sends the metrics of each step to a JSONL file and to all sinks.

    The file, metrics.jsonl with one StepRecord per line, is the permanent record of the run, from which the report is
    made. For this reason `log` raises SlimxError if the file cannot be written. A sink's failures do not stop the run
    but are counted: `warn` is called with a message about the first one, and `close` reports their number."""

    def __init__(
        self, jsonl: JsonlFile, others: Sequence[Sink] = (), warn: Callable[[str], None] = print_warning
    ) -> None:
        self._jsonl = jsonl
        self._others = [(sink, Guard(sink.name, warn)) for sink in others]
        self._warn = warn
        self._closed = False

    @property
    def removed(self) -> int:
        """Number of lines that were removed from metrics.jsonl when the run was resumed: lines of repeated steps, and
        incomplete lines."""
        return self._jsonl.removed

    def log(self, step: int, metrics: Mapping[str, object], *, version: int | None = None) -> None:
        """Logs the metrics of a step, flat or nested (see `flatten`). `version`: version of the engines' weights in
        this step."""
        record = StepRecord(step=step, version=version, time=time.time(), metrics=flatten(metrics))
        self._jsonl.write(record.to_json())
        for sink, guard in self._others:
            guard.call(partial(sink.log, record))

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        """Sends recorded rollouts of a step to all sinks. The rollouts of one call must be either all from an
        evaluation or all from training."""
        if not samples:
            return
        for sink, guard in self._others:
            guard.call(partial(sink.samples, step, samples))

    def close(self) -> dict[str, int]:
        """Closes all sinks, warns about each sink that failed, and returns the number of failures by sink name. May be
        called repeatedly."""
        if not self._closed:
            self._closed = True
            for sink, guard in self._others:
                guard.call(sink.close)
                if guard.failures:
                    self._warn(
                        f"{guard.name} is incomplete (failed calls: {guard.failures}); use metrics.jsonl instead"
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
    """Creates the tracker of a run. Raises SlimxError if a sink cannot be created.

    `resume_step`: first step of a resumed run (0 if it has no checkpoint yet); None for a new run, for which a
    directory with metrics is an error. `config`: configuration of the run, which is passed to all sinks. `settings`:
    keys and values of section `track`."""
    with ExitStack() as undo:  # closes the sinks that exist if another cannot be created
        run = TrackedRun(run_dir, project, name, config, resume_step)
        others: list[Sink] = []
        for key in entry_points.find(SINKS):
            if key not in settings:
                continue
            sink = entry_points.load(SINKS, key)(run, settings[key])
            if sink is not None:
                others.append(sink)
                undo.callback(sink.close)
        # Last, because it removes lines, which must not happen if a sink cannot be created.
        jsonl = JsonlFile(run_dir / "metrics.jsonl", resume_step=resume_step)
        undo.pop_all()
    return Tracker(jsonl, others, warn)


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Identity and configuration of a run, for its sinks."""

    directory: Path
    project: str
    name: str
    config: Mapping[str, object]
    resume_step: int | None = None
    """First step of a resumed run; None for a new run."""

    def id_in(self, file: str) -> str:
        """Returns the id of the run at a tracking service. The id is created once and stored in `file` in the run's
        directory, so that a resumed run has the same id."""
        path = self.directory / file
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text().strip()

    def named(self, file: str) -> Json:
        """Returns the arguments that make wandb or SwanLab start the run, or resume it if its id is already stored in
        `file` in the run's directory."""
        id_ = self.id_in(file)
        return {"project": self.project, "name": self.name, "config": dict(self.config), "id": id_, "resume": "allow"}

    @property
    def yaml(self) -> str:
        """Configuration of the run as YAML."""
        return yaml.safe_dump(dict(self.config), sort_keys=False)


class Sink(Protocol):
    """Destination for step records and samples, such as a tracking service."""

    name: str

    def log(self, record: StepRecord) -> None: ...

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None: ...

    def close(self) -> None: ...
