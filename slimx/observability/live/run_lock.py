"""Lock of a run directory, held by the process that trains in it; others can check it without taking it."""

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
"""Format of struct flock on 64-bit Linux: type, whence, start, length, process."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Creates `directory` if it is missing, and locks it; the kernel releases the lock when the process ends. Raises
    SlimxError if another process holds the lock, or the directory is not writable.

    The lock file is visible to others, also on network file systems. The directory itself is locked too if the file
    system supports it, because the lock file could be removed."""
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
    """Opens the directory and its lock file."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK).open("w")
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY), lock
    except OSError as error:
        raise _unwritable(directory, error, error.filename) from error


def check_usable(directory: Path) -> None:
    """Raises SlimxError as `locked` does, without changing the directory."""
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
        f"{directory}: another process is training in this directory; wait for it or set another run.dir",
        code="run.locked",
        about=str(directory),
    )


def _unwritable(directory: Path, error: OSError, path: Path) -> SlimxError:
    return SlimxError(
        f"run.dir: {directory} is not writable ({error.strerror}: {path}); set another directory",
        code="run.unwritable",
        about=str(directory),
    )


def is_locked(directory: Path) -> bool:
    """Returns True while a process trains in `directory`. It does not take the lock."""
    try:
        with (directory / LOCK).open("r") as file:
            request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            lock = fcntl.fcntl(file, fcntl.F_OFD_GETLK, request)
    except FileNotFoundError:
        return False
    return struct.unpack(_FLOCK, lock)[0] != fcntl.F_UNLCK


def _lock_directory(descriptor: int) -> None:
    """Locks a directory if its file system supports it, which NFS does not. Raises BlockingIOError if it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return
