"""The tracker of a run: each step's numbers and recorded samples go to a JSONL file and to every sink.

Sinks are entry points of the group `slimx.sinks`. Each is named as the key of section `track` that turns it on, and is
a function of a `TrackedRun` and the value of that key. It returns a `Sink`, or None where the value leaves it off.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from slimx import entry_points
from slimx.observability.tracking.guard import Guard, print_warning
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.metrics import StepRecord, flatten
from slimx.observability.tracking.samples import RecordedSample

SINKS = "slimx.sinks"
"""Group of entry points."""


class Tracker:
    """Sends each step's numbers to a JSONL file and to every sink.

    The file (`metrics.jsonl`, one StepRecord per line) is the run's record, which the report reads: if it fails, `log`
    raises. A sink may fail: the failure is counted, its first error is told through `warn`, and `close` tells the
    count.
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
        """Lines of metrics.jsonl that were taken out when the run was resumed: later steps, and one that was torn."""
        return self._jsonl.removed

    def log(self, step: int, metrics: Mapping[str, Any], *, version: int | None = None) -> None:
        """Logs one step, flat or nested `metrics` (see `flatten`); `version` is the weight version in force."""
        record = StepRecord(step=step, version=version, time=time.time(), metrics=flatten(metrics))
        self._jsonl.write(record.to_json())
        for sink, guard in self._others:
            guard.call(lambda sink=sink: sink.log(record))

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        """Shows recorded rollouts of one step as text in every sink; they are all held-out ones, or none is."""
        for sink, guard in self._others if samples else ():
            guard.call(lambda sink=sink: sink.samples(step, samples))

    def close(self) -> dict[str, int]:
        """Closes every sink; tells and returns the failures by sink name (0 where all went well). Again is allowed."""
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
    config: Mapping[str, Any],
    resume_step: int | None,
    settings: Mapping[str, Any],
    warn: Callable[[str], None] = print_warning,
) -> Tracker:
    """The tracker of one run.

    `resume_step`: the next step to be done when a run is resumed (0 if it died before its first checkpoint); None for a
    fresh run, which refuses a directory that holds metrics. `config` is shown in every sink. `settings`: values of the
    keys of section `track`, of which the sinks read theirs. A sink that cannot start raises SlimxError here.
    """
    with ExitStack() as undo:  # a sink that cannot start must not leave the earlier ones open
        run, others = TrackedRun(run_dir, project, name, config, resume_step), []
        for key in entry_points.find(SINKS):
            if key in settings and (sink := entry_points.load(SINKS, key)(run, settings[key])) is not None:
                others.append(sink)
                undo.callback(sink.close)
        # The last one: it takes out lines, which a refusal of a sink must not do.
        jsonl = JsonlFile(run_dir / "metrics.jsonl", resume_step=resume_step)
        undo.pop_all()
    return Tracker(jsonl, others, warn)


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run as its sinks name it."""

    directory: Path
    project: str
    name: str
    config: Mapping[str, Any]
    resume_step: int | None = None
    """The next step of a run that is resumed; None: a fresh one."""

    def id_in(self, file: str) -> str:
        """The id under which a service knows the run, kept in `file` of its directory: a resumed run has the same."""
        path = self.directory / file
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text().strip()

    def named(self, file: str) -> dict[str, Any]:
        """Arguments by which wandb and SwanLab start the run, or go on with the one whose id is in `file`."""
        id_ = self.id_in(file)
        return {"project": self.project, "name": self.name, "config": dict(self.config), "id": id_, "resume": "allow"}

    @property
    def yaml(self) -> str:
        """The configuration as text."""
        return yaml.safe_dump(dict(self.config), sort_keys=False)


class Sink(Protocol):
    """One destination of step records and samples."""

    name: str

    def log(self, record: StepRecord) -> None: ...

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None: ...

    def close(self) -> None: ...
