"""A file with one JSON object per line that survives a kill and a resume, without torn lines or duplicate steps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from slimx.durable import write_atomic
from slimx.errors import SlimxError
from slimx.json_types import Json


class JsonlFile:
    """Appends records to a file. Each is in the file when `write` returns, although a power loss may still lose it.

    With `resume_step = S` the lines of steps >= S are removed first, because the resumed run writes them again. The
    file is replaced by a rename and never half-written. Lines without a step are kept. `resume_step = None` is a new
    run and refuses a file with records, because appending would mix two runs.
    """

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        self.path = path
        self.removed = 0
        """Lines removed on resume: those of steps >= S, and those without a valid record."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            if resume_step is None:
                raise SlimxError(
                    f"{path} has records of an earlier run; resume that run or set another run.dir",
                    code="records.exist",
                    about=str(path),
                )
            self.removed = _truncate(path, resume_step)
        # Unbuffered, because a buffer would keep the rest of a failed write for the next one.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the object

    def write(self, record: Mapping[str, object]) -> None:
        """Appends one line. Raises SlimxError if the write fails, after removing the part that was written."""
        line = memoryview(msgspec.json.encode(record) + b"\n")
        start = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), start)
            raise SlimxError(
                f"{self.path} cannot be written ({error.strerror}); free space or fix the disk, then resume",
                code="records.write",
                about=str(self.path),
            ) from error

    def close(self) -> None:
        """Closes the file; repeated calls are allowed."""
        self._file.close()


def read_lines(path: Path) -> Iterator[tuple[int, bytes, Json | None]]:
    """Yields number (from 1), bytes and object of every line that is not blank; None if it is not a JSON object."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                record = None
            yield number, line, record if isinstance(record, dict) else None


def load_records[T](path: Path, parse: Callable[[Json], T]) -> tuple[list[T], list[str]]:
    """Returns the records of a file, and a sentence for each damaged line, which a reader skips."""
    records = []
    problems = []
    for number, _, record in read_lines(path):
        try:
            if record is None:
                raise ValueError("not a JSON object, or cut short")
            records.append(parse(record))
        except (AttributeError, KeyError, TypeError, ValueError, msgspec.ValidationError, SlimxError) as error:
            problems.append(f"{path.name} line {number} cannot be read ({type(error).__name__}: {error})")
    return records, problems


def _truncate(path: Path, resume_step: int) -> int:
    """Removes the lines of steps >= `resume_step` and lines without a record; returns their number. An interrupted
    write leaves one such line at the end; if there are others the file is damaged, and is copied to NAME.damaged."""
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
