"""Files with one JSON object per line that stay valid when a run is killed and resumed: incomplete lines, and lines of
steps that the resumed run repeats, are removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from slimx.durable import write_atomic
from slimx.errors import SlimxError, raised
from slimx.json_types import Json

UNREADABLE = (AttributeError, KeyError, TypeError, ValueError, msgspec.MsgspecError, SlimxError)
"""Errors about a line that does not contain a record."""


class JsonlFile:
    """Appends records to a file. When `write` returns, the record survives the end of the process, but perhaps not a
    power failure.

    When a run is resumed at step `resume_step`, lines of this and later steps are first removed, because the resumed
    run writes them again; lines without a step are kept. The shortened file replaces the old one in a single rename, so
    the file is never incomplete. `resume_step` is None for a new run, for which an existing file with records is an
    error, because the records of two runs would be mixed."""

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        self.path = path
        self.removed = 0
        """Number of lines removed on resuming: lines of steps >= `resume_step`, and lines without a valid record."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            if resume_step is None:
                raise SlimxError(
                    f"{path} contains records of an earlier run; resume that run, or set another run.dir",
                    code="records.exist",
                    about=str(path),
                )
            self.removed = _truncate(path, resume_step)
        # Unbuffered, because a buffer would write the rest of a failed write again with the next one.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the object

    def write(self, record: Mapping[str, object]) -> None:
        """Appends `record` as a line. If writing fails, removes the part of the line that was written, and raises
        SlimxError."""
        line = memoryview(msgspec.json.encode(record) + b"\n")
        start = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), start)
            raise SlimxError(
                f"{self.path} cannot be written ({error.strerror}); free disk space or repair the disk, and run "
                "the same command again to resume",
                code="records.write",
                about=str(self.path),
            ) from error

    def close(self) -> None:
        """Closes the file. May be called repeatedly."""
        self._file.close()


def read_lines(path: Path) -> Iterator[tuple[int, bytes, Json | None]]:
    """Yields the number (from 1), the bytes and the JSON object of every line that is not blank; the object is None if
    the line does not contain one."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = msgspec.json.decode(line)
            except UNREADABLE:
                record = None
            yield number, line, record if isinstance(record, dict) else None


def load_records[T](path: Path, parse: Callable[[Json], T]) -> tuple[list[T], list[str]]:
    """Returns the records in `path`, each decoded by `parse`, and a message about each line that was left out because
    it could not be decoded."""
    records = []
    problems = []
    for number, _, record in read_lines(path):
        try:
            if record is None:
                raise ValueError("the line is not a complete JSON object")
            records.append(parse(record))
        except UNREADABLE as error:
            problems.append(f"line {number} of {path.name} cannot be read ({raised(error)})")
    return records, problems


def _truncate(path: Path, resume_step: int) -> int:
    """Removes the lines of steps >= `resume_step` and lines without a valid record, and returns their number. An
    interrupted write leaves one invalid line at the end. If there are other invalid lines, the file is damaged, and a
    copy of the file is kept as NAME.damaged."""
    kept = []
    removed = 0
    torn = 0
    damaged = False
    for _, line, record in read_lines(path):
        damaged |= torn > 0
        if record is None:
            torn += 1
        elif isinstance(record.get("step"), int) and record["step"] >= resume_step:
            removed += 1
        else:
            kept.append(line.rstrip(b"\r\n") + b"\n")
    if damaged:
        shutil.copyfile(path, path.with_name(path.name + ".damaged"))
    write_atomic(path, *kept)
    return removed + torn
