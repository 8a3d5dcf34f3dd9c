"""Writing of files and directories that survives a crash of the machine, or a full disk."""

import os
from pathlib import Path

from slimx.errors import SlimxError


def sync_directory(directory: Path) -> None:
    """Bring a directory's entries to disk: a file that is synced, but whose name is not, is lost."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, *pieces: bytes | memoryview) -> None:
    """Write `pieces`, one after the other, and bring them to disk."""
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, *pieces: bytes | memoryview, sync: bool = True) -> None:
    """Put `pieces` in place of the file `path`: readers see the old file or all of the new one.

    `sync`: the old one also survives a crash of the machine. Raises OSError, without leaving a part behind."""
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
    """`write_atomic` for a file that a run cannot do without. Raises SlimxError where it cannot be written."""
    try:
        write_atomic(path, data)
    except OSError as error:
        raise SlimxError(
            f"{path} cannot be written ({error.strerror}); free space or fix the disk, then start again",
            code="disk.write",
            about=str(path),
        ) from error
