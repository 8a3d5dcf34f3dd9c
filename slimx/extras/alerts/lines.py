"""Lines of files to which a run appends: the last ones, and those that are new."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from slimx.json_types import Json
from slimx.observability.tracking.jsonl import UNREADABLE


def last_lines(file: Path, nbytes: int) -> list[bytes]:
    """Returns the lines that end within the last `nbytes` bytes of a file. The first one may be incomplete. Returns []
    if there is no file."""
    if not file.exists():
        return []
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - nbytes))
        return lines.read().split(b"\n")[:-1]


class Growing[T]:
    """File of JSON lines that a run appends to. Each complete line is parsed once. If a resumed run has truncated or
    replaced the file, it is read again from the start."""

    def __init__(self, path: Path, parse: Callable[[Json], T], keep: int | None = None) -> None:
        """Stores the parameters without reading the file. `parse`: converts the JSON object on a line to a record.
        `keep`: number of newest records to keep; None: all."""
        self._path = path
        self._parse = parse
        self._file: tuple[int, int] | None = None
        self.records: deque[T] = deque(maxlen=keep)
        self.read = 0
        """Number of bytes that have been read."""

    def refresh(self) -> tuple[bool, list[T]]:
        """Reads and parses the lines that were appended since the last call. Returns their records without those of
        damaged lines, and True before them if they begin at the file's start, because this is the first call or another
        file has taken the place of the old one. Raises OSError if the file cannot be read; the next call then reads the
        same lines."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                same = (status.st_dev, status.st_ino)
                begins = same != self._file or status.st_size < self.read
                start = 0 if begins else self.read
                file.seek(start)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return False, []
        if begins:
            self.records.clear()
        self._file = same
        self.read = start + len(complete) + len(newline)
        new = []
        for line in complete.split(b"\n"):
            with suppress(*UNREADABLE):  # incomplete lines of a killed process; the report names them
                new.append(self._parse(msgspec.json.decode(line)))
        self.records += new
        return begins, new
