"""Rows of JSON lines; those of other files are read by entry points of `slimx.prompt_files`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from slimx import entry_points
from slimx.errors import SlimxError

Row = tuple[str, int, dict[str, Any]]
"""The place of a row, for messages; its number, from 1; and its values by column."""
BOM = b"\xef\xbb\xbf"
"""Mark that Excel and Windows' editors begin UTF-8 files with."""


def read_rows(path: str | Path, subset: str | None = None, split: str | None = None) -> tuple[str, Iterator[Row]]:
    """Returns the name that rows without an id are numbered under, and the rows of `path` in order.

    An entry point of `slimx.prompt_files` takes the same arguments and returns the same, or None for a path that it
    leaves to others. `subset` and `split` choose among the files of a data set.

    Raises SlimxError, also while rows are read, naming the file, and the line or row, and what is wrong with it.
    """
    for read in entry_points.load_all("slimx.prompt_files").values():
        if (found := read(path, subset, split)) is not None:
            return found
    return Path(path).stem, json_lines(Path(path))


def json_lines(path: Path) -> Iterator[Row]:
    """Rows of a file with one JSON object per line."""
    with path.open("rb") as lines:  # bytes: text mode would also end lines at characters that JSON strings may hold
        for number, line in enumerate(lines, 1):
            if line := line.removeprefix(BOM).strip():
                where = f"{path}, line {number}"
                yield where, number, _object(line, where)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SlimxError(
            f"{where}: not a JSON object ({error}); write one object per line", code="prompts.line", about=where
        ) from error
    return as_row(fields, where)


def as_row(fields: Any, where: str) -> dict[str, Any]:
    """Returns `fields` if they are an object. Raises SlimxError naming `where` if not."""
    if not isinstance(fields, dict):
        raise SlimxError(
            f"{where}: holds {kind_of(fields)}, not a JSON object; write one object per line",
            code="prompts.line",
            about=where,
        )
    return fields


def kind_of(value: Any) -> str:
    """The kind of a value of JSON, as a sentence names it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    kinds = {str: "a text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")
