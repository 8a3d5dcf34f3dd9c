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


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` and bring it to disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, data: bytes) -> None:
    """Put `data` in place of the file `path`, which stays as it is until all of it is on disk.

    Raises SlimxError where it cannot be written."""
    partial = path.with_name(path.name + ".partial")
    try:
        write_synced(partial, data)
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SlimxError(
            f"{path} cannot be written ({error.strerror}); free space or fix the disk, then start again",
            code="disk.write",
            about=str(path),
        ) from error
