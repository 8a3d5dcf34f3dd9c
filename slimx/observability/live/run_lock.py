"""Lock of a run directory: the process that trains in it holds it, and others can see that without taking it."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from slimx.errors import SlimxError

LOCK = "lock"
_FLOCK = "@hhqqi4x"
"""struct flock of Linux on 64 bits: type, whence, start, length, process."""


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Make `directory` if it is not there, and hold it; the kernel gives it back however this process ends. Raises
    SlimxError if another process holds it, or nothing can be written there.

    The lock file tells others, on network file systems too; the directory itself is locked as well, where the file
    system can, so that a removed lock file lets nobody in."""
    place, lock = _opened(directory)
    try:
        with lock as file:
            try:
                _lock_directory(place)
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            except (BlockingIOError, PermissionError):
                raise _locked(directory) from None
            yield
    finally:
        os.close(place)


def _opened(directory: Path) -> tuple[int, TextIO]:
    """The directory and its lock file."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK).open("w")
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY), lock
    except OSError as error:
        raise _unwritable(directory, error, error.filename) from error


def check_usable(directory: Path) -> None:
    """Raise SlimxError as `held` does, and change nothing in the directory."""
    there = next(each for each in (directory, *directory.parents) if os.path.lexists(each))
    try:
        TemporaryFile(dir=there).close()
        locked = is_held(directory)
    except OSError as error:
        raise _unwritable(directory, error, there) from error
    if locked:
        raise _locked(directory)


def _locked(directory: Path) -> SlimxError:
    return SlimxError(
        f"{directory}: another process is training there; wait for it or choose another run.dir",
        code="run.locked",
        about=str(directory),
    )


def _unwritable(directory: Path, error: OSError, there: Path) -> SlimxError:
    return SlimxError(
        f"run.dir: nothing can be written in {directory} ({error.strerror}: {there}); choose another",
        code="run.unwritable",
        about=str(directory),
    )


def is_held(directory: Path) -> bool:
    """True while a process trains in `directory`. Looks only: a process that starts meanwhile is not refused."""
    try:
        with (directory / LOCK).open("r") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked)
    except FileNotFoundError:
        return False
    return struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK


def _lock_directory(place: int) -> None:
    """Lock a directory where its file system can; NFS, for one, cannot. Raises BlockingIOError if another does."""
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return
