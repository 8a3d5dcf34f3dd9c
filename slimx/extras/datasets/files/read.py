"""Rows of JSON, CSV, TSV, parquet and Arrow files, of directories, and of data sets of the Hugging Face Hub. Only
`hf://` paths are downloaded."""

from __future__ import annotations

import csv
import difflib
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from slimx import entry_points
from slimx.data.prompts.rows import BOM, Row, as_row, json_lines
from slimx.errors import SlimxError
from slimx.extras.datasets.files.directories import SUFFIXES, chosen_files, folder_columns, matching
from slimx.extras.datasets.files.hub import HUB, hub_files
from slimx.extras.datasets.files.tables import table_rows

DATASETS = "slimx.datasets"
"""Entry point group that registers the published data sets that `slimx data` writes as prompt files, by name."""
CELL = 2**26
"""Maximum number of characters in a CSV cell. Python's limit of 2**17 is too small for long documents."""


def read(path: str | Path, subset: str | None = None, split: str | None = None) -> tuple[str, Iterator[Row]]:
    """Reads a file, the files that match a pattern with *, a directory, or hf://OWNER/NAME. Returns the id prefix for
    rows without an id, and the rows, as `slimx.data.prompts.rows.read_rows` does.

    `subset` and `split` select files of a directory or of hf://. Folders named COLUMN=VALUE add a column to the rows of
    their files.
    """
    if str(path).startswith(HUB):
        name = "/".join(str(path).removeprefix(HUB).split("/")[1:])
        return name, _numbered(hub_files(str(path), subset, split), None)
    path = Path(path)
    name = re.sub(r"\W*[*?\[].*", "", path.stem) or path.parent.name
    if path.is_dir():
        return name, _numbered(chosen_files(path, subset, split), path)
    files = matching(path)
    if files:
        return name, _numbered(files, path)
    return name, _file_rows(path)


def _numbered(files: Sequence[Path], folder: Path | None) -> Iterator[Row]:
    """Yields the rows of `files`, numbered consecutively across files. Adds to each row the columns that the names of
    folders below `folder` encode."""
    number = 0
    for file in files:
        columns = folder_columns(file, folder) if folder is not None else {}
        for where, _, row in _file_rows(file):
            number += 1
            yield where, number, columns | row


def _file_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise SlimxError(
            f"{path} cannot be read ({error.strerror}); {_instead_of(path)}",
            code="prompts.unreadable",
            about=str(path),
        ) from error
    ending = path.suffix.lower()
    if magic == b"PAR1" or ending in (".parquet", ".arrow"):
        yield from table_rows(path, stream=ending == ".arrow")
    elif ending in (".csv", ".tsv"):
        yield from _csv_rows(path, "\t" if ending == ".tsv" else ",")
    elif ending == ".json" and _begins_array(path):
        yield from _array_rows(path)
    elif ending in ("", *SUFFIXES):
        try:
            yield from json_lines(path)
        except SlimxError as error:
            if not isinstance(error.__cause__, UnicodeDecodeError):
                raise
            raise SlimxError(
                f"{error.about}: the file is not UTF-8 text; save it as UTF-8, for example with `iconv -f latin1 -t "
                f"utf8 {shlex.quote(str(path))}` if it is Latin-1",
                code="prompts.line",
                about=error.about,
            ) from error.__cause__
    else:
        raise SlimxError(
            f"{path}: the file name ends in {path.suffix}, but must end in {' or '.join(SUFFIXES)}; convert the file "
            "to one of these formats, or correct the ending of the name",
            code="prompts.ending",
            about=str(path),
        )


def _begins_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2**16).removeprefix(BOM).lstrip().startswith(b"[")


def _instead_of(path: Path) -> str:
    """Returns a hint for a file that cannot be read: a file with a similar name, or how to obtain prompts."""
    neighbours = {file.stem: file for file in path.parent.glob("*") if file.suffix in SUFFIXES}
    near = difflib.get_close_matches(path.stem, neighbours, n=1)
    if near:
        return f"did you mean {neighbours[near[0]]}?"
    known = next((name for name in entry_points.find(DATASETS) if path.name.startswith(name)), None)
    hint = "give a prompt file, or write one with `slimx data`"
    if known is not None:
        hint = f"write it with `{shlex.join(['slimx', 'data', known, str(path)])}`"
    if re.fullmatch(r"[\w-][\w.-]*/[\w-]+", str(path)):
        hint += f"; for a data set of the Hugging Face Hub write {HUB}{path}"
    return hint


def _array_rows(path: Path) -> Iterator[Row]:
    try:
        rows = msgspec.json.decode(path.read_bytes().removeprefix(BOM))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SlimxError(
            f"{path}: the file is not valid JSON ({error}); correct the syntax, and save the file as UTF-8",
            code="prompts.unreadable",
            about=str(path),
        ) from error
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        yield where, number, as_row(row, where)


def _csv_rows(path: Path, delimiter: str) -> Iterator[Row]:
    """Yields the rows of a CSV file with strings as values. An empty cell becomes None, because CSV has no other way to
    represent null."""
    csv.field_size_limit(CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter=delimiter, strict=True)
            twice = [name for name, count in Counter(rows.fieldnames or ()).items() if count > 1]
            if twice:
                raise SlimxError(
                    f"{path}: the header contains {twice[0]!r} more than once; give each column a different name",
                    code="prompts.unreadable",
                    about=str(path),
                )
            for number, row in enumerate(rows, 1):
                where = f"{path}, row {number}"
                if None in row or None in row.values():
                    header = len(rows.fieldnames or ())
                    cells = header + len(row.get(None, ())) - list(row.values()).count(None)
                    raise SlimxError(
                        f"{where}: the row has {cells} cells, but the header has {header} cells; write {header} cells "
                        f"in each row, and quote cells that contain {delimiter!r}",
                        code="prompts.line",
                        about=where,
                    )
                yield where, number, {name: cell or None for name, cell in row.items()}
    except (csv.Error, UnicodeDecodeError) as error:
        raise SlimxError(
            f"{path}: the file is not valid CSV ({error}); save the file as UTF-8, with cells separated by "
            f"{delimiter!r}",
            code="prompts.unreadable",
            about=str(path),
        ) from error
