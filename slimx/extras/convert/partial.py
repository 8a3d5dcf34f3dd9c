"""The directory that a conversion is written into, and what in it is the conversion's own.

    OUT.partial/                 while it is written; becomes OUT at the end
        FILE.writing             a file that is being written; begun anew after a kill
        FILE                     a finished file, on disk
        .conversion/plan         what is converted into what: another conversion must not go on here
        .conversion/done/FILE    size and XXH3 of a finished file, and what its writer noted

Nothing else is ever written, taken over or deleted: a directory without a plan, or with a file that the plan does not
know, is somebody else's.
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
    """A finished file."""

    record: FileRecord
    notes: Any
    """Notes of the file's writer, handed back at the end of the conversion."""


class Partial:
    """OUT.partial of a conversion."""

    def __init__(self, out: Path, planned: Collection[str], small: Collection[str]):
        """`planned`, `small`: names of the files that the conversion writes, and of those that complete them.

        Raises SlimxError if something has the name `out` already."""
        if os.path.lexists(out) or out.name in ("", ".."):
            raise SlimxError(
                f"{out} is there already; remove it or choose another directory", code="convert.exists", about=str(out)
            )
        self.out, self.path = out, out.with_name(out.name + ".partial")
        self._state = self.path / _STATE
        written = {self.path / name for name in (*planned, *small)} | {self.told(name) for name in planned}
        self._files = written | {self.writing(file) for file in written} | {self._plan}
        self._folders = {folder for file in self._files for folder in file.parents if self.path in folder.parents}

    @property
    def _plan(self) -> Path:
        return self._state / "plan"

    def told(self, name: str) -> Path:
        """The record of the finished file `name`."""
        return self._state / "done" / name.replace("/", "-")

    def writing(self, file: Path) -> Path:
        """The path at which `file` is written until it is whole."""
        return file.with_name(file.name + _WRITING)

    @contextlib.contextmanager
    def owned(self, fingerprint: str) -> Iterator[None]:
        """Make the directory and hold it: one process at a time, and for the conversion with `fingerprint` only.

        Raises SlimxError, and leaves all as it is, for a directory that is not this conversion's."""
        self._make()
        handle = os.open(self._state, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SlimxError(
                    f"{self.path}: another process is writing it; wait for it to end",
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
        for folder, folders, files in os.walk(self.path):
            here = Path(folder)
            odd = [here / name for name in folders if here / name not in self._folders]
            odd += [here / name for name in files if here / name not in self._files]
            if odd and not (self._plan.is_file() and self._plan.read_bytes() != fingerprint.encode()):
                raise self._foreign(min(odd))
        if not self._plan.exists():
            if any(file.exists() for file in self._files):
                raise self._foreign(self.path)
            self._state.joinpath("done").mkdir(exist_ok=True)
            write_synced(self._plan, fingerprint.encode())
        elif self._plan.read_bytes() != fingerprint.encode():
            raise SlimxError(
                f"{self.path} was begun by a conversion of other files or with other options; remove it to begin anew",
                code="convert.other",
                about=str(self.path),
            )

    def _foreign(self, path: Path) -> SlimxError:
        return SlimxError(
            f"{path}: was not made by this conversion, which writes into {self.path}; move it away, or choose another "
            "directory",
            code="convert.foreign",
            about=str(path),
        )

    def finished(self, names: Collection[str], threads: int) -> dict[str, Done]:
        """Complete files of an earlier try, by name: those whose bytes are still the ones that were written."""
        for name in names:
            self.writing(self.path / name).unlink(missing_ok=True)
        claimed: dict[str, Done] = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                claimed[name] = msgspec.json.decode(self.told(name).read_bytes(), type=Done)

        def whole(name: str) -> bool:
            file = self.path / name
            return file.is_file() and file.stat().st_size == claimed[name].record.size and _same(file, claimed[name])

        with ThreadPoolExecutor(threads) as pool:
            return {name: claimed[name] for name, same in zip(claimed, pool.map(whole, claimed), strict=True) if same}

    def tell(self, name: str, done: Done) -> None:
        """Record that file `name` is finished.

        The record is not brought to disk: where a crash of the machine leaves it damaged, or the file's name is lost,
        that file is written again."""
        told = self.told(name)
        self.writing(told).write_bytes(msgspec.json.encode(done))
        self.writing(told).rename(told)

    def discard(self) -> None:
        """Remove what the conversion has made, and the directory if nothing else is in it."""
        for file in self._files:
            file.unlink(missing_ok=True)
        for folder in (*sorted(self._folders, key=lambda folder: -len(folder.parts)), self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def publish(self) -> None:
        """Give the complete directory its name, on disk."""
        if os.path.lexists(self.out):
            raise SlimxError(
                f"{self.out} has come into being meanwhile; move it away and run the same command again",
                code="convert.exists",
                about=str(self.out),
            )
        shutil.rmtree(self._state)
        for folder in (self._folders - {self._state, self._state / "done"}) | {self.path}:
            sync_directory(folder)
        self.path.rename(self.out)
        sync_directory(self.out.parent)

    def refusal(self, error: OSError) -> SlimxError:
        """The SlimxError that tells whoever gave the command what `error` means."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return SlimxError(
                f"{self.path}: no space is left on its disk; make room and run the same command again: it goes on "
                "after the files that are finished",
                code="convert.space",
                about=str(self.path),
            )
        named = str(error.filename or self.path)
        return SlimxError(
            f"{named}: cannot be written or read ({error.strerror or error})", code="convert.system", about=named
        )


def _same(file: Path, done: Done) -> bool:
    return record(file) == done.record
