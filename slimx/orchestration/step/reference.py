"""Periodic replacement of the reference model with the policy's current weights (`algorithm.reference_refresh`).

A checkpoint contains only the policy, so each new reference is also written as RUN/reference-NNNNNN, from which a
resumed run loads it. A run that forks another run's checkpoint copies that run's reference. References that no
checkpoint needs are removed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

from slimx.config.sections.policies import ACTOR
from slimx.errors import SlimxError
from slimx.orchestration.run import Run

_CHECKPOINT = re.compile(r"iter_(\d+)(\.partial)?")
_REFERENCE = re.compile(r"reference-(\d+)(\.partial)?")


async def refresh_reference(run: Run) -> None:
    """Refreshes the reference if this is due after the current step: makes the current weights the new reference, saves
    it, and removes saved references that are no longer needed."""
    if not run.due(run.config.algorithm.reference_refresh):
        return
    async with run.trainers_turn():
        await run.recovery.with_retry(run.policies[ACTOR].trainers.refresh_reference)
    await run.export(reference_path(run.directory, run.step).name)
    every = run.config.algorithm.reference_refresh
    written = {run.step}
    for name in _names(run.directory / "checkpoints"):
        match = _CHECKPOINT.fullmatch(name)
        if match:
            written.add(int(match[1]))
    needed = set()
    for step in written | run.recovery.bases():
        needed.add(reference_step(step, every))
    for name in _names(run.directory):
        match = _REFERENCE.fullmatch(name)
        if match and int(match[1]) not in needed:
            shutil.rmtree(run.directory / name)


async def restore_reference(run: Run, checkpoint: Path) -> None:
    """Loads the reference that belongs to `checkpoint`, from which `run` has resumed. Before the first replacement, the
    reference is the initial weights, which trainers have loaded already. Raises SlimxError if the reference is missing.
    """
    every = run.config.algorithm.reference_refresh
    last = reference_step(run.step, every)
    if not last:
        return
    path = reference_path(run.directory, last)
    origin = checkpoint.resolve().parents[1] / path.name
    if not path.is_dir() and origin.is_dir():
        await asyncio.to_thread(_copy, origin, path)
    if not path.is_dir():
        raise SlimxError(
            f"{path} does not exist, but the checkpoint of step {run.step} needs the reference weights "
            f"in this directory (algorithm.reference_refresh={every}); restore the directory, or start a new run with "
            "trainer.load set to the checkpoint",
            code="reference.lost",
            about=str(path),
        )
    await run.policies[ACTOR].trainers.refresh_reference(path)


def _copy(origin: Path, path: Path) -> None:
    """Copies a directory of another run, so that neither run depends on the other. Uses hard links if the file system
    supports them, because the files never change."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(origin, partial, copy_function=_link)
    partial.rename(path)


def _link(origin: str, path: str) -> None:
    try:
        os.link(origin, path)
    except OSError:
        shutil.copy2(origin, path)


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


def reference_path(directory: Path, step: int) -> Path:
    """Returns the directory of the reference that was made after `step` steps of the run in `directory`."""
    return directory / f"reference-{step:06d}"


def reference_step(step: int, every: int) -> int:
    """Returns the last step, up to `step`, after which the reference was replaced; 0 if it is still the initial
    weights. `every`: value of `algorithm.reference_refresh`."""
    return step - step % every if every else 0
