"""Writing of files and directories so that their content survives a crash of the machine or a full disk."""

import os
from pathlib import Path

from slimx.errors import SlimxError


def sync_directory(directory: Path) -> None:
    """Flushes the entries of `directory` to disk. A file whose content is synced is still lost if its directory entry
    is not."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, *pieces: bytes | memoryview) -> None:
    """Writes `pieces`, one after the other, to the file at `path`, and flushes them to disk."""
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, *pieces: bytes | memoryview, sync: bool = True) -> None:
    """Replaces the content of the file at `path` with `pieces`, so that readers see either the complete old or the
    complete new content.

    `sync`: guarantee this even if the machine crashes. Raises OSError without leaving a partial file."""
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
    """Replaces the content of the file at `path` as `write_atomic` does, for files without which a run cannot continue.
    Raises SlimxError if it cannot be written."""
    try:
        write_atomic(path, data)
    except OSError as error:
        raise SlimxError(
            f"{path} cannot be written ({error.strerror}); make the path writable or free up disk space, then repeat "
            "the command",
            code="disk.write",
            about=str(path),
        ) from error
