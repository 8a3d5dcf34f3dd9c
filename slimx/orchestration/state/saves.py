"""Checkpoints of a run: a directory is complete or it does not exist.

    RUN/checkpoints/
        latest_checkpointed_iteration.txt    the newest complete one, for Megatron-LM
        iter_0000040/
            .metadata  common.pt  *.distcp   model, optimizer and random state (torch_dist, as Megatron-LM lays it out)
            critic/                          the critic of a PPO run, likewise
            policies/NAME/                   each further policy of a run that trains several, likewise
            slimx/run.json                   step, version, layouts, cursor of the prompts
            slimx/tickets.bin                admitted prompts and the groups that are generated but not trained
            slimx/manifest.json              size and digest of every file; written last, then the directory is named

A save writes into `iter_0000040.partial` and renames it when all is on disk: a kill in between leaves the last good
one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimx.data.saved.codec import decode, encode
from slimx.durable import sync_directory, write_atomic
from slimx.errors import SlimxError
from slimx.models.files.torch_dist import TRACKER, iteration_name
from slimx.rollout.flow.tickets import SavedTicket
from slimx.trainer.checkpoint.files import MANIFEST, REPORTS, Damaged, FileRecord, write, write_manifest

_NAME = re.compile(r"iter_(\d{7,})")
_RUN, _TICKETS = "slimx/run.json", "slimx/tickets.bin"

CURSOR = "cursor"
"""Folder of a run directory with the position of `slimx generate`."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The state that a run needs to continue, besides the trainers' own."""

    step: int
    """Steps done."""
    version: int
    """Weight version of the engines."""
    policies: dict[str, dict[str, Any]]
    """By name the fields of each policy's trainers (`slimx.orchestration.state.resume.trainer_state`)."""
    rollouts: dict[str, Any]
    """`RolloutManager.state()`."""
    critic: dict[str, Any] | None = None
    """Parallel sizes of the critic that the checkpoint holds; None: it holds none."""

    def files(self) -> dict[str, bytes]:
        """The state as the files that hold it, by path in the checkpoint."""
        rollouts = dict(self.rollouts)
        tickets = rollouts.pop("tickets", [])
        fields = {**asdict(self), "rollouts": rollouts}
        return {_RUN: json.dumps(fields, indent=1).encode(), _TICKETS: encode(tickets)}


def relaid(files: dict[str, bytes], policy: str, layout: dict[str, Any]) -> dict[str, bytes]:
    """The files of a state in which the ranks of `policy` have the parallel sizes `layout` now."""
    fields = json.loads(files[_RUN])
    fields["policies"][policy]["layout"] = layout
    return files | {_RUN: json.dumps(fields, indent=1).encode()}


class Saves:
    """The saved checkpoints of one run, as directories: which are complete, which stay, and how one gets its name."""

    def __init__(self, directory: Path, *, keep: int, keep_every: int = 0):
        """`keep`: newest ones that stay. `keep_every`: multiples of this step stay for good; 0: none does."""
        self.directory, self.keep, self.keep_every = directory, keep, keep_every

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        done = sorted(self._complete())
        return done[-1][1] if done else None

    def set_aside(self, damaged: Path) -> Path | None:
        """Give the damaged checkpoint another name, under which it is never read again; None, and nothing happens,
        where no other complete one would be left."""
        if len(self._complete()) < 2:
            return None
        aside = damaged.with_name(f"{damaged.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        return damaged.rename(aside)

    def begin(self, step: int, parts: Sequence[str] = (".",)) -> Path:
        """An empty directory to write step `step` into, with room for the reports of each part (a path in it); what
        interrupted saves left is removed."""
        for left in self.directory.glob("iter_*.partial"):
            shutil.rmtree(left)
        partial = self.directory / f"{iteration_name(step)}.partial"
        for part in parts:
            (partial / part / REPORTS).mkdir(parents=True)
        return partial

    def commit(self, partial: Path, own: dict[str, bytes], written: dict[str, FileRecord]) -> Path:
        """Add the run's `own` files to those that trainers have `written`, make the directory complete under its name,
        and remove checkpoints that are not kept."""
        for reports in list(partial.rglob(REPORTS)):
            shutil.rmtree(reports)
        records = {name: write(partial / name, data) for name, data in own.items()}
        write_manifest(partial, written | records)
        for directory in sorted((path for path in partial.rglob("*") if path.is_dir()), reverse=True):
            sync_directory(directory)
        sync_directory(partial)
        final = partial.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        self._track(final)
        kept = {path for _, path in sorted(self._complete())[-self.keep :]}
        for step, path in self._complete():
            if path not in kept and not (self.keep_every and step % self.keep_every == 0):
                shutil.rmtree(path)
        return final

    def begin_export(self, target: Path) -> Path:
        """An empty directory beside `target` to write into."""
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit_export(self, partial: Path, target: Path) -> None:
        """Give a finished export its name, in place of an older one."""
        sync_directory(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync_directory(target.parent)

    def _track(self, newest: Path) -> None:
        """Tell Megatron-LM which one is the newest; a kill before that leaves it the one before, which still exists."""
        match = re.fullmatch(_NAME, newest.name)
        assert match is not None
        write_atomic(self.directory / TRACKER, str(int(match[1])).encode())
        sync_directory(self.directory)

    def _complete(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        found = [(re.fullmatch(_NAME, path.name), path) for path in self.directory.iterdir()]
        return [(int(match[1]), path) for match, path in found if match and (path / MANIFEST).is_file()]


def saved_step(directory: Path) -> int:
    """The step of the newest complete checkpoint of the run in `directory`; 0 where there is none."""
    newest = Saves(directory / "checkpoints", keep=1).newest()
    return 0 if newest is None else int(newest.name.removeprefix("iter_"))


def read_state(path: Path) -> RunState:
    """The run's state in checkpoint `path`. Raises Damaged naming the file that is, and SlimxError for the state of
    another release of slimx."""
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


def _read(path: Path, name: str, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse((path / name).read_bytes())
    except (OSError, ValueError, TypeError, SlimxError) as error:
        raise Damaged(path, path / name, f"cannot be read ({error})") from error
