"""Lock of a run's directory, held by the process that trains in it. Other processes can test the lock without acquiring
it."""

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
"""Format string for the module `struct` that packs the C structure flock of 64-bit Linux: type, whence, start, length,
process id."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Creates `directory` if it is missing, and locks it until the block ends; the kernel also releases the lock when
    the process ends. Raises SlimxError if another process holds the lock, or if the directory is not writable.

    If the directory is on a network file system, the lock on the lock file also excludes processes on other machines.
    Because the lock file could be removed, the directory itself is locked too if its file system supports that."""
    descriptor, lock = _open(directory)
    try:
        with lock as file:
            try:
                _lock_directory(descriptor)
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            except (BlockingIOError, PermissionError):
                raise _locked(directory) from None
            yield
    finally:
        os.close(descriptor)


def _open(directory: Path) -> tuple[int, TextIO]:
    """Creates the directory if it is missing, and opens it and its lock file. Raises SlimxError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK).open("w")
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY), lock
    except OSError as error:
        raise _unwritable(directory, error, error.filename) from error


def check_usable(directory: Path) -> None:
    """Raises the same errors as `locked`, but changes nothing in the directory."""
    existing = next(folder for folder in (directory, *directory.parents) if os.path.lexists(folder))
    try:
        TemporaryFile(dir=existing).close()
        locked = is_locked(directory)
    except OSError as error:
        raise _unwritable(directory, error, existing) from error
    if locked:
        raise _locked(directory)


def _locked(directory: Path) -> SlimxError:
    return SlimxError(
        f"another process is training in {directory}; wait until that process has ended, or set another run.dir",
        code="run.locked",
        about=str(directory),
    )


def _unwritable(directory: Path, error: OSError, path: Path) -> SlimxError:
    return SlimxError(
        f"run.dir: {directory} is not writable ({error.strerror}: {path}); set run.dir to a writable directory",
        code="run.unwritable",
        about=str(directory),
    )


def is_locked(directory: Path) -> bool:
    """Returns True if a process is training in `directory`. Does not acquire the lock."""
    try:
        with (directory / LOCK).open("r") as file:
            request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            lock = fcntl.fcntl(file, fcntl.F_OFD_GETLK, request)
    except FileNotFoundError:
        return False
    return struct.unpack(_FLOCK, lock)[0] != fcntl.F_UNLCK


def _lock_directory(descriptor: int) -> None:
    """Locks the open directory `descriptor` if its file system supports that, which NFS does not. Raises
    BlockingIOError if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return
