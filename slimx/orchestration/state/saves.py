"""Directories of a run's checkpoints. A checkpoint is either complete, or it does not exist under its final name.

    RUN/checkpoints/
        latest_checkpointed_iteration.txt    step of the newest complete checkpoint, for Megatron-LM
        iter_0000040/
            .metadata  common.pt  *.distcp   model, optimizer and random state (torch_dist, in Megatron-LM's layout)
            critic/                          the critic of a PPO run, in the same format
            policies/NAME/                   each policy other than the actor, in the same format
            slimx/run.json                   step, version, layouts, position in the prompts
            slimx/tickets.bin                prompts in progress, and generated groups that wait to be trained on
            slimx/manifest.json              size and digest of every file; written last

A save writes into `iter_0000040.partial` and renames this directory when everything is on disk. If the run is killed
before the rename, the previous complete checkpoint remains the newest.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slimx.data.saved.codec import decode, encode
from slimx.durable import sync_directory, write_atomic
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.models.files.torch_dist import TRACKER, iteration_name
from slimx.rollout.flow.tickets import SavedTicket
from slimx.trainer.checkpoint.files import MANIFEST, REPORTS, Damaged, FileRecord, write, write_manifest

_NAME = re.compile(r"iter_(\d{7,})")
_RUN = "slimx/run.json"
_TICKETS = "slimx/tickets.bin"

CURSOR = "cursor"
"""Subdirectory of a run's directory in which `slimx generate` saves its position in the prompts."""


@dataclass(frozen=True, slots=True)
class RunState:
    """State that a run needs to resume, apart from the state of its trainers."""

    step: int
    """Number of completed steps."""
    version: int
    """Version of the engines' weights."""
    policies: dict[str, Json]
    """Fields that describe each policy's trainers, by policy name (see
    `slimx.orchestration.state.resume.trainer_state`)."""
    rollouts: Json
    """Result of `RolloutManager.state()` or `Replay.state()`: the position in the prompts, and the groups that have not
    been trained on yet."""
    critic: Json | None = None
    """Parallel sizes of the ranks that wrote the critic's part of the checkpoint; None without a critic."""

    def files(self) -> dict[str, bytes]:
        """Returns the contents of the files that store this state, by path in the checkpoint."""
        rollouts = dict(self.rollouts)
        tickets = rollouts.pop("tickets", [])
        fields = asdict(replace(self, rollouts=rollouts))
        return {_RUN: json.dumps(fields, indent=1).encode(), _TICKETS: encode(tickets)}


def relaid(files: dict[str, bytes], policy: str, layout: Json) -> dict[str, bytes]:
    """Returns copies of `files`, a result of `RunState.files`, in which the parallel sizes of policy `policy` are
    replaced with `layout`."""
    fields = json.loads(files[_RUN])
    fields["policies"][policy]["layout"] = layout
    return files | {_RUN: json.dumps(fields, indent=1).encode()}


class Saves:
    """Directories of one run's checkpoints and exports: finds complete checkpoints, creates and completes new ones, and
    removes old ones."""

    def __init__(self, directory: Path, *, keep: int, keep_every: int = 0):
        """Sets which checkpoints in `directory` are kept: the newest `keep` ones, and all checkpoints whose step is a
        multiple of `keep_every`; if `keep_every` is 0, only the newest ones."""
        self.directory = directory
        self.keep = keep
        self.keep_every = keep_every

    def newest(self) -> Path | None:
        """Returns the newest complete checkpoint; None if there is none."""
        done = sorted(self._complete())
        return done[-1][1] if done else None

    def set_aside(self, damaged: Path) -> Path | None:
        """Renames the checkpoint `damaged`, so that it is never loaded again, and returns its new path. If no other
        complete checkpoint exists, returns None without renaming it."""
        if len(self._complete()) < 2:
            return None
        aside = damaged.with_name(f"{damaged.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        return damaged.rename(aside)

    def begin(self, step: int, parts: Sequence[str] = (".",)) -> Path:
        """Creates an empty directory for the save of step `step` and returns it. `parts`: folders to create in it, one
        for each rank group that writes files, each with a folder for the reports of the group's ranks. Removes
        directories of interrupted saves."""
        for interrupted in self.directory.glob("iter_*.partial"):
            shutil.rmtree(interrupted)
        partial = self.directory / f"{iteration_name(step)}.partial"
        for part in parts:
            (partial / part / REPORTS).mkdir(parents=True)
        return partial

    def commit(self, partial: Path, driver_files: dict[str, bytes], written: dict[str, FileRecord]) -> Path:
        """Completes a save and returns the checkpoint's final path. Writes `driver_files` (contents by path), records
        them together with `written` (the records of the files that the ranks wrote), renames the directory, and removes
        checkpoints that need not be kept."""
        for reports in list(partial.rglob(REPORTS)):
            shutil.rmtree(reports)
        records = dict(written)
        for name, data in driver_files.items():
            records[name] = write(partial / name, data)
        write_manifest(partial, records)
        for path in sorted(partial.rglob("*"), reverse=True):
            if path.is_dir():
                sync_directory(path)
        sync_directory(partial)
        final = partial.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        self._track(final)
        complete = sorted(self._complete())
        newest = {path for _, path in complete[-self.keep :]}
        for step, path in complete:
            if path not in newest and not (self.keep_every and step % self.keep_every == 0):
                shutil.rmtree(path)
        return final

    def begin_export(self, target: Path) -> Path:
        """Creates an empty directory next to `target` for an export and returns it."""
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit_export(self, partial: Path, target: Path) -> None:
        """Renames the directory of a finished export to `target`, and removes the previous directory of that name."""
        sync_directory(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync_directory(target.parent)

    def _track(self, newest: Path) -> None:
        """Records checkpoint `newest` in the file from which Megatron-LM reads the step to load. If the run is killed
        before this call, the file still names the previous checkpoint."""
        match = re.fullmatch(_NAME, newest.name)
        assert match is not None
        write_atomic(self.directory / TRACKER, str(int(match[1])).encode())
        sync_directory(self.directory)

    def _complete(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        complete = []
        for path in self.directory.iterdir():
            match = re.fullmatch(_NAME, path.name)
            if match and (path / MANIFEST).is_file():
                complete.append((int(match[1]), path))
        return complete


def saved_step(directory: Path) -> int:
    """Returns the step of the newest complete checkpoint of the run in `directory`; 0 if there is none."""
    newest = Saves(directory / "checkpoints", keep=1).newest()
    return 0 if newest is None else int(newest.name.removeprefix("iter_"))


def read_state(path: Path) -> RunState:
    """Reads the run's state from checkpoint `path`. Raises Damaged, which names the file, if a file is damaged, and
    SlimxError if the state was written by a release of slimx that stores different fields."""
    fields = _read(path, _RUN, json.loads)
    tickets = _read(path, _TICKETS, lambda data: decode(list[SavedTicket], data))
    try:
        fields["rollouts"]["tickets"] = tickets
        return RunState(**fields)
    except (TypeError, KeyError) as error:
        raise SlimxError(
            f"{path / _RUN} does not have the fields that this release of slimx expects ({error}); resume with "
            "the release that wrote this file, or set trainer.load to this checkpoint in a new run"
        ) from error


def _read[T](path: Path, name: str, parse: Callable[[bytes], T]) -> T:
    try:
        return parse((path / name).read_bytes())
    except (OSError, ValueError, TypeError, SlimxError) as error:
        raise Damaged(path, path / name, f"cannot be read ({error})") from error
