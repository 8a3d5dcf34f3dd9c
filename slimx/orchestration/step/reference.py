"""A reference that follows the policy (`algorithm.reference_refresh`): at times it becomes the present weights.

A checkpoint holds the policy alone, so that each new reference is also written as RUN/reference-NNNNNN, where a resumed
run finds the one that its step compares with; a run that forks a checkpoint takes the other run's along. What no
checkpoint needs any more is removed."""

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
    """Make the present weights the reference, if that is due after a step."""
    if not run.due(run.config.algorithm.reference_refresh):
        return
    async with run.trainers_turn():
        await run.recovery.lasting(run.policies[ACTOR].trainers.refresh_reference)
    await run.export(reference_path(run.directory, run.step).name)
    every, written = run.config.algorithm.reference_refresh, {run.step}
    for found in map(_CHECKPOINT.fullmatch, _names(run.directory / "checkpoints")):
        if found:
            written.add(int(found[1]))
    needed = {reference_step(step, every) for step in written | run.recovery.bases()}
    for found in map(_REFERENCE.fullmatch, _names(run.directory)):
        if found and int(found[1]) not in needed:
            shutil.rmtree(run.directory / found[0])


async def restore_reference(run: Run, checkpoint: Path) -> None:
    """Give the trainers the reference that belongs to `checkpoint`, from which `run` was resumed; before the first
    refresh it is the initial weights, with which they start. Raises SlimxError if it is lost."""
    every = run.config.algorithm.reference_refresh
    last = reference_step(run.step, every)
    if not last:
        return
    path = reference_path(run.directory, last)
    origin = checkpoint.resolve().parents[1] / path.name
    if not path.is_dir() and origin.is_dir():
        await asyncio.to_thread(_take_along, origin, path)
    if not path.is_dir():
        raise SlimxError(
            f"{path} does not exist: it is the reference of the checkpoint of step {run.step} "
            f"(algorithm.reference_refresh={every}); bring it back, or begin a new run from this checkpoint's weights",
            code="reference.lost",
            about=str(path),
        )
    await run.policies[ACTOR].trainers.refresh_reference(path)


def _take_along(origin: Path, path: Path) -> None:
    """Copy a directory, so that neither run needs the other's. Its files are never changed, so links will do where the
    file system has them."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(origin, partial, copy_function=_linked)
    partial.rename(path)


def _linked(origin: str, path: str) -> None:
    try:
        os.link(origin, path)
    except OSError:
        shutil.copy2(origin, path)


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


def reference_path(directory: Path, step: int) -> Path:
    """Directory of the weights that became the reference after `step` steps of the run in `directory`."""
    return directory / f"reference-{step:06d}"


def reference_step(step: int, every: int) -> int:
    """The step whose weights are the reference of a run that has done `step` steps; 0: the initial weights."""
    return step - step % every if every else 0
