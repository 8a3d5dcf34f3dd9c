"""Directory to which a conversion writes, and the files in it that belong to the conversion.

    OUT.partial/                 during the conversion; renamed to OUT at the end
        FILE.writing             a file that is being written; written again after a kill
        FILE                     a finished file, synced to disk
        .conversion/plan         identity of the conversion; another conversion must not continue in this directory
        .conversion/done/FILE    size and XXH3 of a finished file, and its writer's notes

No other file is ever written, reused or deleted. A directory without a plan, or with a file that is not in the plan, is
refused, because it may belong to another program.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from slimx.digest import FileRecord, record
from slimx.durable import sync_directory, write_synced
from slimx.errors import SlimxError

_STATE = ".conversion"
_WRITING = ".writing"


class Done(msgspec.Struct, frozen=True):
    """Size, digest and `write` result of a finished file, recorded so that a retry can keep the file."""

    record: FileRecord
    notes: Any
    """Result of the file's `write`, which the conversion's `finish` receives."""


class Partial:
    """Directory OUT.partial of an unfinished conversion."""

    def __init__(self, out: Path, planned: Collection[str], small: Collection[str]):
        """Prepares to write a conversion to `out`; creates nothing yet. `planned`: names of the files that the
        conversion writes in parallel; `small`: names of the files that it adds at the end. Raises SlimxError if `out`
        exists."""
        if os.path.lexists(out) or out.name in ("", ".."):
            raise SlimxError(
                f"{out} already exists; remove {out}, or choose another output directory",
                code="convert.exists",
                about=str(out),
            )
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        self._state = self.path / _STATE
        written = {self.path / name for name in (*planned, *small)}
        written |= {self.record_path(name) for name in planned}
        self._files = written | {self.writing(file) for file in written} | {self._plan}
        self._folders: set[Path] = set()
        for file in self._files:
            folder = file.parent
            while folder != self.path:
                self._folders.add(folder)
                folder = folder.parent

    @property
    def _plan(self) -> Path:
        return self._state / "plan"

    def record_path(self, name: str) -> Path:
        """Returns the path of the record that marks the file `name` as finished."""
        return self._state / "done" / name.replace("/", "-")

    def writing(self, file: Path) -> Path:
        """Returns the path that `file` has while it is being written."""
        return file.with_name(file.name + _WRITING)

    @contextlib.contextmanager
    def owned(self, fingerprint: str) -> Iterator[None]:
        """Creates the directory and locks it during the `with` block, so that no other process and no conversion with
        another `fingerprint` uses it.

        Raises SlimxError, without changing anything, if another process has locked the directory, or if it belongs to
        another conversion."""
        self._make()
        handle = os.open(self._state, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SlimxError(
                    f"another process is writing to {self.path}; wait until that process ends, then run the same "
                    "command again",
                    code="convert.busy",
                    about=str(self.path),
                ) from None
            self._check(fingerprint)
            yield
        finally:
            os.close(handle)

    def _make(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir()
            (self._state / "done").mkdir(parents=True)
        except FileExistsError:
            if self.path.is_symlink() or not self._state.is_dir():
                raise self._foreign(self.path) from None

    def _check(self, fingerprint: str) -> None:
        other = self._plan.is_file() and self._plan.read_bytes() != fingerprint.encode()
        for root, folders, files in os.walk(self.path):
            folder = Path(root)
            unknown = {folder / name for name in folders} - self._folders
            unknown |= {folder / name for name in files} - self._files
            if unknown and not other:
                raise self._foreign(min(unknown))
        if not self._plan.exists():
            if any(file.exists() for file in self._files):
                raise self._foreign(self.path)
            self._state.joinpath("done").mkdir(exist_ok=True)
            write_synced(self._plan, fingerprint.encode())
        elif other:
            raise SlimxError(
                f"{self.path} was written by an earlier conversion with different source files or options; remove "
                f"{self.path} to start over",
                code="convert.other",
                about=str(self.path),
            )

    def _foreign(self, path: Path) -> SlimxError:
        return SlimxError(
            f"{path} was not created by this conversion, which keeps its unfinished files in {self.path}; move {path} "
            "to another place, or choose another output directory",
            code="convert.foreign",
            about=str(path),
        )

    def finished(self, names: Collection[str], threads: int) -> dict[str, Done]:
        """Returns, by name, the records of the files that an earlier attempt finished and that have not changed since.
        `threads`: number of files that are read in parallel."""
        for name in names:
            self.writing(self.path / name).unlink(missing_ok=True)
        claimed: dict[str, Done] = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                claimed[name] = msgspec.json.decode(self.record_path(name).read_bytes(), type=Done)

        def intact(name: str) -> bool:
            file = self.path / name
            expected = claimed[name].record
            return file.is_file() and file.stat().st_size == expected.size and record(file) == expected

        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(intact, claimed))
        for name, ok in zip(list(claimed), results, strict=True):
            if not ok:
                del claimed[name]
        return claimed

    def mark_done(self, name: str, done: Done) -> None:
        """Records that the file `name` is finished.

        The record is not synced to disk. If a crash of the host damages the record or loses the file's directory entry,
        the file is written again."""
        path = self.record_path(name)
        self.writing(path).write_bytes(msgspec.json.encode(done))
        self.writing(path).rename(path)

    def discard(self) -> None:
        """Removes the conversion's files, and then the directory if no other files are in it."""
        for file in self._files:
            file.unlink(missing_ok=True)
        for folder in (*sorted(self._folders, key=lambda folder: -len(folder.parts)), self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def publish(self) -> None:
        """Renames the complete directory to its final name, and syncs the directory and the new name to disk. Raises
        SlimxError if that name exists."""
        if os.path.lexists(self.out):
            raise SlimxError(
                f"{self.out} was created by another program during the conversion; rename {self.out}, then run the "
                "same command again",
                code="convert.exists",
                about=str(self.out),
            )
        shutil.rmtree(self._state)
        for folder in (self._folders - {self._state, self._state / "done"}) | {self.path}:
            sync_directory(folder)
        self.path.rename(self.out)
        sync_directory(self.out.parent)

    def refusal(self, error: OSError) -> SlimxError:
        """Builds the SlimxError that explains an OS error of the conversion to the user."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return SlimxError(
                f"{self.path}: no space is left on the disk; free up space, then run the same command again to "
                "continue after the last finished file",
                code="convert.space",
                about=str(self.path),
            )
        path = str(error.filename or self.path)
        return SlimxError(
            f"the conversion cannot access {path} ({error.strerror or error}); make {path} readable and writable for "
            "this user, or replace a faulty disk, then run the same command again",
            code="convert.system",
            about=path,
        )
