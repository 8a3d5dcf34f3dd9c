"""Checkpoints of a run: a directory is complete or it does not exist.

    RUN/checkpoints/step-000040/
        trainer/        model, optimizer and random state (torch_dist)
        run.json        step, version, layout, cursor of the prompts
        tickets.bin     admitted prompts and the groups that are generated but not trained
        COMPLETE        written last, before the directory gets its name

A save writes into `step-000040.partial` and renames it when all is on disk: a kill in between leaves the last good one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimx.data.codec import decode, encode
from slimx.errors import SlimxError
from slimx.rollout.manager import SavedTicket

_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class RunState:
    """What a run must know to continue, besides the trainer's own state."""

    step: int
    """Optimizer steps done."""
    version: int
    """Weight version of the engines."""
    layout: dict[str, int]
    """Parallel sizes that wrote the checkpoint."""
    rollouts: dict[str, Any]
    """`RolloutManager.state()`."""


class Saves:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path, *, keep: int):
        self.directory, self.keep = directory, keep

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        done = sorted(self._complete())
        return done[-1][1] if done else None

    def begin(self, step: int) -> Path:
        """An empty directory to write step `step` into; what an interrupted save left is removed."""
        partial = self.directory / f"step-{step:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "trainer").mkdir(parents=True)
        return partial

    def commit(self, partial: Path, state: RunState) -> Path:
        """Add the run's state, make the directory complete under its name, and remove checkpoints beyond `keep`."""
        rollouts = dict(state.rollouts)
        tickets = rollouts.pop("tickets", [])
        _write(partial / "tickets.bin", encode(tickets))
        _write(partial / "run.json", json.dumps({**asdict(state), "rollouts": rollouts}, indent=1).encode())
        _write(partial / "COMPLETE", b"")
        _sync(partial)
        final = partial.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(self.directory)
        for _, old in sorted(self._complete())[: -self.keep]:
            shutil.rmtree(old)
        return final

    def begin_export(self, target: Path) -> Path:
        """An empty directory beside `target` to write into."""
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit_export(self, partial: Path, target: Path) -> None:
        """Give a finished export its name, in place of an older one."""
        _sync(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _sync(target.parent)

    def _complete(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        found = [(re.fullmatch(_NAME, path.name), path) for path in self.directory.iterdir()]
        return [(int(match[1]), path) for match, path in found if match and (path / "COMPLETE").is_file()]


def read_state(path: Path) -> RunState:
    """The run's state in checkpoint `path`. Raises SlimxError naming a damaged file."""
    try:
        fields = json.loads((path / "run.json").read_text())
        tickets = decode(list[SavedTicket], (path / "tickets.bin").read_bytes())
        fields["rollouts"]["tickets"] = tickets
        return RunState(**fields)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SlimxError(
            f"{path}: the checkpoint's run.json or tickets.bin is damaged ({error}); remove the directory"
        ) from error


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Bring the directory's entries to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
