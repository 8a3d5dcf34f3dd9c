"""Lines at the end of files to which a run appends, and new records in its metrics.jsonl."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from slimx.errors import SlimxError
from slimx.observability.tracking.metrics import StepRecord


def last_lines(file: Path, nbytes: int) -> list[bytes]:
    """Returns the lines that end within the last `nbytes` bytes of a file. The first one may be incomplete. Returns []
    if there is no file."""
    if not file.exists():
        return []
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - nbytes))
        return lines.read().split(b"\n")[:-1]


class NewRecords:
    """Reader of metrics.jsonl that returns every record once, in the order of the file."""

    def __init__(self, file: Path) -> None:
        """Stores the path; does not read yet."""
        self._file = file
        self._inode: int | None = None
        self._read = 0
        """Number of bytes that have been read."""

    def read(self) -> tuple[bool, list[StepRecord]]:
        """Returns the records that were added since the last call, and True before them if they begin at the file's
        start, because this is the first call or another file has taken the place of the old one. Leaves out damaged
        lines. Raises OSError if the file cannot be read."""
        if not self._file.is_file():
            return False, []
        with self._file.open("rb") as file:
            status = os.fstat(file.fileno())
            begins = status.st_ino != self._inode or status.st_size < self._read
            if begins:
                self._inode = status.st_ino
                self._read = 0
            file.seek(self._read)
            content = file.read()
        lines = content[: content.rfind(b"\n") + 1]
        self._read += len(lines)
        records = []
        for line in lines.splitlines():
            with suppress(AttributeError, KeyError, TypeError, ValueError, SlimxError):
                records.append(StepRecord.from_json(json.loads(line)))
        return begins, records
