"""Destinations of a step's numbers beside metrics.jsonl: entry points of the group `slimx.sinks`.

Each is named as the key of section `track` that turns it on, and is a function of a `TrackedRun` and the value of that
key. It returns a `Sink`, or None where the value leaves it off.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.samples import RecordedSample

SINKS = "slimx.sinks"
"""Group of entry points."""


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
