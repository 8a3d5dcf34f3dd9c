"""Names of the references that a run with `algorithm.reference_refresh` writes."""

from __future__ import annotations

from pathlib import Path


def reference_path(directory: Path, step: int) -> Path:
    """Directory of the weights that became the reference after `step` steps of the run in `directory`."""
    return directory / f"reference-{step:06d}"


def reference_step(step: int, every: int) -> int:
    """The step whose weights are the reference of a run that has done `step` steps; 0: the initial weights."""
    return step - step % every if every else 0
