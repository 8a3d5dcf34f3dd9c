"""Files of a run that an archive contains, each read from its last lines if it is long. Links are never followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
WHOLE = 20 * MIB
"""Maximum number of bytes of all files together, before compression."""
LIMITS = {
    "config.yaml": MIB,
    "summary.json": MIB,
    "engines.json": MIB,
    "activity.json": MIB,
    "alerts.jsonl": MIB,
    "dropped.jsonl": MIB,
    "metrics.jsonl": 5 * MIB,
    "timeline.jsonl": 2 * MIB,
}
"""Maximum number of bytes of files in the run's directory."""
FOLDERS = {"logs": 4 * MIB, "stacks": MIB, "eval": MIB}
"""Maximum number of bytes of all files in these subdirectories together. Their files share it equally."""
FILES = 64
"""Maximum number of files of one subdirectory: the newest ones."""
CONTEXT = 2**16
"""Number of bytes that are read before the last lines of a long file, because they may show that those contain a
secret."""
SUFFIXES = (".log", ".txt", ".jsonl", ".json")
"""Endings of the files that are taken from subdirectories."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A file of the run that belongs into the archive."""

    name: str
    """Path relative to the run's directory."""
    text: str
    """The file, or its last lines and `CONTEXT` bytes before them; see `shortened`."""
    size: int
    """Size of the file in bytes."""
    limit: int
    """Maximum number of bytes of the file that the archive contains."""

    @property
    def cut(self) -> bool:
        """True if the archive contains only the last lines of the file."""
        return self.size > self.limit

    def shortened(self, text: str) -> bytes:
        """Returns the bytes of `text`, which is `text` of this file after redaction: only the last complete lines in
        `limit` bytes if the file is cut."""
        data = text.encode()
        if not self.cut or len(data) <= self.limit:
            return data
        return data[-self.limit :].partition(b"\n")[2]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file of the run that does not get into the archive."""

    name: str
    why: str


def files_of(directory: Path) -> Iterator[Taken | LeftOut]:
    """Yields the files of the run in `directory`, and those that are left out with the reason."""
    for name, limit in LIMITS.items():
        if os.path.lexists(directory / name):
            yield taken(directory, name, limit)
    for folder, limit in FOLDERS.items():
        path = directory / folder
        if path.is_symlink():
            yield LeftOut(folder, "it is a link")
        elif path.is_dir():
            yield from _files_in(directory, folder, limit)


def _files_in(directory: Path, folder: str, limit: int) -> Iterator[Taken | LeftOut]:
    times: dict[str, float] = {}
    try:
        for entry in os.scandir(directory / folder):
            if entry.name.endswith(SUFFIXES):
                with suppress(FileNotFoundError):  # a log that has been removed meanwhile
                    times[entry.name] = entry.stat(follow_symlinks=False).st_mtime
    except OSError as error:
        yield LeftOut(folder, str(error.strerror))
        return
    newest = sorted(times, key=times.__getitem__, reverse=True)
    for name in newest[FILES:]:
        yield LeftOut(f"{folder}/{name}", f"{FILES} files of {folder} are newer")
    names = sorted(newest[:FILES])
    for name in names:
        yield taken(directory, f"{folder}/{name}", limit // len(names))


def taken(directory: Path, name: str, limit: int) -> Taken | LeftOut:
    """Returns the file `name` of the run in `directory`, of which the archive is to contain at most `limit` bytes. A
    link, anything that is no regular file, and a file that cannot be read is left out."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return LeftOut(name, "it is not a regular file")
        with open(descriptor, "rb") as file:
            start = 0
            if status.st_size > limit:
                start = max(0, status.st_size - limit - CONTEXT)
            file.seek(start)
            data = file.read(status.st_size - start)
    except OSError as error:
        if (directory / name).is_symlink():
            return LeftOut(name, "it is a link")
        return LeftOut(name, str(error.strerror))
    if start:
        data = data.partition(b"\n")[2]
    return Taken(name, data.decode(errors="replace"), status.st_size, limit)
