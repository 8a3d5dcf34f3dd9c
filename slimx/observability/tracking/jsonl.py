"""A file of one JSON object per line that survives a kill and a resume: no torn line, no step twice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slimx.durable import write_atomic
from slimx.errors import SlimxError


class JsonlFile:
    """Appends records to a file; each is in the file when `write` returns (a later power loss may still take it).

    With `resume_step = S` the lines of steps >= S are removed first, so that the resumed run writes them anew; the file
    is replaced in one rename and is never half-written. Lines without a step stay. `resume_step = None` is a fresh run
    and refuses a file that holds records already: appending would mix two runs.
    """

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        self.path = path
        self.removed = 0
        """Lines taken out on resume: those of steps >= S, and those that hold no record."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            if resume_step is None:
                raise SlimxError(
                    f"{path} holds the records of an earlier run; resume it or choose another run directory",
                    code="records.exist",
                    about=str(path),
                )
            self.removed = _truncate(path, resume_step)
        # Unbuffered: a failed write leaves nothing behind in Python that a later write would push out in the middle.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the object

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line. Raises SlimxError if the file cannot take it; the part that was written is taken back."""
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
        """Closes the file; again is allowed."""
        self._file.close()


def read_lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Every line that is not blank: its number from 1, its bytes, its object; None where it holds no JSON object."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                record = None
            yield number, line, record if isinstance(record, dict) else None


def load_records[T](path: Path, parse: Callable[[dict[str, Any]], T]) -> tuple[list[T], list[str]]:
    """Every record of a file, and one sentence per line that holds none, for a reader that must not stop at damage."""
    records, problems = [], []
    for number, _, record in read_lines(path):
        try:
            if record is None:
                raise ValueError("not a JSON object, or cut short")
            records.append(parse(record))
        except (AttributeError, KeyError, TypeError, ValueError, msgspec.ValidationError, SlimxError) as error:
            problems.append(f"{path.name} line {number} cannot be read ({type(error).__name__}: {error})")
    return records, problems


def _truncate(path: Path, resume_step: int) -> int:
    """Removes the lines of steps >= `resume_step` and those that hold no record; returns how many. A write that was cut
    short leaves one, at the end; with any other the file is damaged, and stays as NAME.damaged."""
    kept, removed, torn, damaged = [], 0, 0, False
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
