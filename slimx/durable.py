"""What files and directories must go through to survive a crash of the machine."""

import os
from pathlib import Path


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
