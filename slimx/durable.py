"""Writes of files and directories that survive a crash of the machine or a full disk."""

import os
from pathlib import Path

from slimx.errors import SlimxError


def sync_directory(directory: Path) -> None:
    """Flushes a directory's entries to disk: a synced file whose name is not synced is lost."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, *pieces: bytes | memoryview) -> None:
    """Writes `pieces` one after the other and flushes them to disk."""
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, *pieces: bytes | memoryview, sync: bool = True) -> None:
    """Replaces the file `path` by `pieces`: readers see the old file or all of the new one.

    `sync`: also true after a crash of the machine. Raises OSError without leaving a partial file behind."""
    partial = path.with_name(path.name + ".partial")
    try:
        if sync:
            write_synced(partial, *pieces)
        else:
            partial.write_bytes(b"".join(pieces))
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def replace_synced(path: Path, data: bytes) -> None:
    """Replaces a file that a run depends on, as `write_atomic` does. Raises SlimxError if it cannot be written."""
    try:
        write_atomic(path, data)
    except OSError as error:
        raise SlimxError(
            f"{path} cannot be written ({error.strerror}); free space or fix the disk, then start again",
            code="disk.write",
            about=str(path),
        ) from error
