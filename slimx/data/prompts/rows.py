"""Rows of JSON Lines files; entry points of the group `slimx.prompt_files` read other files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from slimx import entry_points
from slimx.errors import SlimxError
from slimx.json_types import Json

Row = tuple[str, int, Json]
"""A row of a file: its location for error messages; its number, counted from 1; and its values by column."""
BOM = b"\xef\xbb\xbf"
"""Byte order mark at the start of UTF-8 files from Excel and Windows."""


def read_rows(path: str | Path, subset: str | None = None, split: str | None = None) -> tuple[str, Iterator[Row]]:
    """Returns the prefix of the ids that are given to rows without an id, and the rows of `path` in order.

    An entry point of `slimx.prompt_files` takes the same arguments and returns the same values, or None for a path that
    it does not support. `subset` and `split`: parts of a data set to read.

    Raises SlimxError, also during iteration, naming the file, the line or row, and the problem.
    """
    for read in entry_points.load_all("slimx.prompt_files").values():
        result = read(path, subset, split)
        if result is not None:
            return result
    return Path(path).stem, json_lines(Path(path))


def json_lines(path: Path) -> Iterator[Row]:
    """Yields the rows of a file that has one JSON object per line. Blank lines are skipped."""
    with path.open("rb") as lines:  # bytes, because text mode splits lines at characters that JSON strings may contain
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(BOM).strip()
            if text:
                where = f"{path}, line {number}"
                yield where, number, _object(text, where)


def _object(line: bytes, where: str) -> Json:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SlimxError(
            f"{where}: the line is not a JSON object ({error}); write one JSON object per line",
            code="prompts.line",
            about=where,
        ) from error
    return as_row(fields, where)


def as_row(fields: object, where: str) -> Json:
    """Returns `fields` unchanged. Raises SlimxError if it is not a JSON object. `where`: location of the row, for
    errors."""
    if not isinstance(fields, dict):
        raise SlimxError(
            f"{where}: the row is {kind_of(fields)}, not a JSON object; write each row as a JSON object",
            code="prompts.line",
            about=where,
        )
    return fields


def kind_of(value: object) -> str:
    """Returns a description of a JSON value's type, for error messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    kinds = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")
