"""The result of a training run from a script."""

from __future__ import annotations

import os
from pathlib import Path

from slimx.extras.scripting.rows import Rows
from slimx.extras.scripting.tables import metrics, rollouts


class RunResult(os.PathLike[str]):
    """A run that has been trained. `str(result)` and `Path(result)` are the path of its directory."""

    def __init__(self, directory: Path, report: Path | None):
        self.directory = directory
        self.report = report
        """HTML report about the run; None if the run writes none (`track.report`)."""

    @property
    def metrics(self) -> Rows:
        """Metrics of the run, one row per step; see `slimx.metrics`."""
        return metrics(self.directory)

    def rollouts(self, step: int | None = None) -> Rows:
        """Returns the responses of `step`, or one row per saved step; see `slimx.rollouts`."""
        return rollouts(self.directory, step)

    def __fspath__(self) -> str:
        return str(self.directory)

    def __str__(self) -> str:
        return str(self.directory)

    def __repr__(self) -> str:
        return f"run {self.directory}" + (f", report {self.report}" if self.report else "")

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.directory / name
