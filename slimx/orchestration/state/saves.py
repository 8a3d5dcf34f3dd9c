"""Checkpoints of a run: a directory is complete, or it does not exist.

    RUN/checkpoints/
        latest_checkpointed_iteration.txt    the newest complete one, for Megatron-LM
        iter_0000040/
            .metadata  common.pt  *.distcp   model, optimizer and random state (torch_dist, in Megatron-LM's layout)
            critic/                          the critic of a PPO run, in the same form
            policies/NAME/                   each further policy of a run that trains several, in the same form
            slimx/run.json                   step, version, layouts, position in the prompts
            slimx/tickets.bin                admitted prompts and the groups that are generated but not trained
            slimx/manifest.json              size and digest of every file; written last, before the rename

A save writes into `iter_0000040.partial` and renames it when everything is on disk: a kill in between leaves the last
complete one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
"""Folder of a run directory with the position of `slimx generate`."""


@dataclass(frozen=True, slots=True)
class RunState:
    """State that a run needs to resume, in addition to the trainers' state."""

    step: int
    """Completed steps."""
    version: int
    """Weight version of the engines."""
    policies: dict[str, Json]
    """Fields of each policy's trainers by name (`slimx.orchestration.state.resume.trainer_state`)."""
    rollouts: Json
    """`RolloutManager.state()`."""
    critic: Json | None = None
    """Parallel sizes of the critic in the checkpoint; None without a critic."""

    def files(self) -> dict[str, bytes]:
        """Returns the contents of the state's files by path in the checkpoint."""
        rollouts = dict(self.rollouts)
        tickets = rollouts.pop("tickets", [])
        fields = {**asdict(self), "rollouts": rollouts}
        return {_RUN: json.dumps(fields, indent=1).encode(), _TICKETS: encode(tickets)}


def relaid(files: dict[str, bytes], policy: str, layout: Json) -> dict[str, bytes]:
    """Returns the files of a state after the ranks of `policy` have changed to the parallel sizes `layout`."""
    fields = json.loads(files[_RUN])
    fields["policies"][policy]["layout"] = layout
    return files | {_RUN: json.dumps(fields, indent=1).encode()}


class Saves:
    """Saved checkpoints of one run: which are complete, which are kept, and how one is committed."""

    def __init__(self, directory: Path, *, keep: int, keep_every: int = 0):
        """Sets the policy. `keep`: number of newest ones to keep. `keep_every`: multiples of this step are kept
        forever; 0: none."""
        self.directory = directory
        self.keep = keep
        self.keep_every = keep_every

    def newest(self) -> Path | None:
        """Returns the newest complete checkpoint."""
        done = sorted(self._complete())
        return done[-1][1] if done else None

    def set_aside(self, damaged: Path) -> Path | None:
        """Renames the damaged checkpoint, so that it is never read again; returns its new path. Returns None without
        renaming it if no other complete one is left."""
        if len(self._complete()) < 2:
            return None
        aside = damaged.with_name(f"{damaged.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        return damaged.rename(aside)

    def begin(self, step: int, parts: Sequence[str] = (".",)) -> Path:
        """Returns an empty directory for the save of step `step`, with folders for the reports of each part (a path in
        it). Removes interrupted saves."""
        for interrupted in self.directory.glob("iter_*.partial"):
            shutil.rmtree(interrupted)
        partial = self.directory / f"{iteration_name(step)}.partial"
        for part in parts:
            (partial / part / REPORTS).mkdir(parents=True)
        return partial

    def commit(self, partial: Path, driver_files: dict[str, bytes], written: dict[str, FileRecord]) -> Path:
        """Adds `driver_files` to the files that trainers have `written`, renames the complete directory, and removes
        checkpoints that are not kept."""
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
        """Returns an empty directory next to `target` for an export."""
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit_export(self, partial: Path, target: Path) -> None:
        """Renames a finished export to `target`, which it replaces."""
        sync_directory(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync_directory(target.parent)

    def _track(self, newest: Path) -> None:
        """Records the newest one for Megatron-LM; after a kill before that, the record names the previous one."""
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
    """Reads the run's state from checkpoint `path`. Raises Damaged naming the damaged file, SlimxError for the state
    of another release of slimx."""
    fields = _read(path, _RUN, json.loads)
    tickets = _read(path, _TICKETS, lambda data: decode(list[SavedTicket], data))
    try:
        fields["rollouts"]["tickets"] = tickets
        return RunState(**fields)
    except (TypeError, KeyError) as error:
        raise SlimxError(
            f"{path / _RUN} has other fields than this slimx writes ({error}); go on with the release that wrote it, "
            "or begin a new run from its weights (trainer.load)",
        ) from error


def _read[T](path: Path, name: str, parse: Callable[[bytes], T]) -> T:
    try:
        return parse((path / name).read_bytes())
    except (OSError, ValueError, TypeError, SlimxError) as error:
        raise Damaged(path, path / name, f"cannot be read ({error})") from error
