"""Rows of JSONL, JSON, CSV, parquet and Arrow files, of directories of them, and of data sets of the Hugging Face Hub.

pyarrow and huggingface_hub are imported where they are needed, and nothing is downloaded but what `hf://` names.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from slimx.errors import SlimxError, raised

HUB = "hf://"
CONVERTED = "refs/convert/parquet"
"""Branch on which the Hub keeps any data set's parquet files, as SUBSET/SPLIT/NNNN.parquet."""
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv")
NAMED = 6
"""Subsets and splits that a refusal names, at most."""
Row = tuple[str, int, dict[str, Any]]
"""The place of a row, for messages; its number, from 1; and its values by column."""


def read_rows(path: str | Path, subset: str | None = None, split: str | None = None) -> Iterator[Row]:
    """Rows of a file, a directory or hf://OWNER/NAME, in order. `subset` and `split` choose files of the last two.

    Raises SlimxError naming the file, and the line or row, and what is wrong with it.
    """
    if str(path).startswith(HUB):
        name, subset, split = _hub_name(str(path), subset, split)
        path = _downloaded(name, subset, split)
    path = Path(path)
    if not path.is_dir():
        yield from _file_rows(path)
        return
    number = 0
    for file in chosen_files(path, subset, split):
        for where, _, row in _file_rows(file):
            number += 1
            yield where, number, row


def stem_of(path: str | Path) -> str:
    """The name that rows without an id are numbered under."""
    if str(path).startswith(HUB):
        return "/".join(str(path).removeprefix(HUB).split("/")[1:])
    return Path(path).stem


def chosen_files(directory: Path, subset: str | None, split: str | None) -> list[Path]:
    """The data files of one subset and split in a directory, in the order of their names. Raises SlimxError where there
    are none, or several subsets or splits to choose from."""
    files = sorted(file for file in directory.rglob("*") if file.suffix in SUFFIXES and not _is_note(file, directory))
    if not files:
        raise SlimxError(
            f"{directory}: holds no file that ends in {', '.join(SUFFIXES)}; name a file or directory of prompts",
            code="prompts.unreadable",
            about=str(directory),
        )
    parts: dict[tuple[str, ...], list[Path]] = {}
    for file in files:
        parts.setdefault(_part_of(file, directory), []).append(file)
    fitting = {
        names: found
        for names, found in parts.items()
        if (split is None or names[-1] == split) and (subset is None or subset in names[:-1])
    }
    if len(fitting) != 1:
        names = ["/".join(names) for names in (fitting or parts)]
        there = ", ".join(names[:NAMED]) + f" and {len(names) - NAMED} more" * (len(names) > NAMED)
        which = "several of" if fitting else "none of"
        raise SlimxError(
            f"{directory}: subset {subset or 'any'} and split {split or 'any'} mean {which} {there}; choose one with "
            "subset and split of an entry of rollout.sources, or name its file",
            code="prompts.split",
            about=str(directory),
        )
    return next(iter(fitting.values()))


def _is_note(file: Path, directory: Path) -> bool:
    """True for what a data set holds beside its rows, and for what is hidden."""
    hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
    return hidden or file.name in ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")


def _part_of(file: Path, directory: Path) -> tuple[str, ...]:
    """Folders of a file, and its split: test of test-00000-of-00001.parquet, the folder's name of 0000.parquet."""
    folders = [name for name in file.relative_to(directory).parts[:-1] if name != "data"]
    name = re.sub(r"-\d+-of-\d+$", "", file.stem)
    if re.fullmatch(r"\d+|data", name):
        return tuple(folders) or (directory.name,)
    return (*folders, name)


def _file_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise SlimxError(
            f"{path}: cannot be read ({error.strerror}); {_instead_of(path)}",
            code="prompts.unreadable",
            about=str(path),
        ) from error
    if magic == b"PAR1" or path.suffix == ".parquet":
        yield from _table_rows(path, _parquet)
    elif path.suffix == ".arrow":
        yield from _table_rows(path, _arrow)
    elif path.suffix == ".csv":
        yield from _csv_rows(path)
    elif path.suffix == ".json" and magic.lstrip().startswith(b"["):
        yield from _array_rows(path)
    else:
        yield from _json_lines(path)


def _instead_of(path: Path) -> str:
    """A way to go on without a file that cannot be read: the one that was meant, or where prompts come from."""
    beside = {file.stem: file for file in path.parent.glob("*") if file.suffix in SUFFIXES}
    if near := difflib.get_close_matches(path.stem, beside, n=1):
        return f"did you mean {beside[near[0]]}?"
    from slimx.data.prompt_files.known import KNOWN  # imports numpy, which reading rows does not need

    if (known := next((name for name in KNOWN if path.name.startswith(name)), None)) is not None:
        return f"`slimx data {known} {path}` writes it"
    hub = f"; for a data set of the Hugging Face Hub write {HUB}{path}"
    like_one = re.fullmatch(r"[\w-][\w.-]*/[\w-]+", str(path)) is not None
    return f"name a file of prompts, or write one with slimx data{hub if like_one else ''}"


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:  # bytes: text mode would also end lines at characters that JSON strings may hold
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, number, _object(line, where)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SlimxError(
            f"{where}: not a JSON object ({error}); write one object per line", code="prompts.line", about=where
        ) from error
    return _as_row(fields, where)


def _as_row(fields: Any, where: str) -> dict[str, Any]:
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


def _array_rows(path: Path) -> Iterator[Row]:
    try:
        rows = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SlimxError(
            f"{path}: not readable as JSON ({error})", code="prompts.unreadable", about=str(path)
        ) from error
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        yield where, number, _as_row(row, where)


def _csv_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), 1):
                where = f"{path}, row {number}"
                if None in row or None in row.values():
                    raise SlimxError(
                        f"{where}: has not as many cells as the header; correct it", code="prompts.line", about=where
                    )
                yield where, number, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise SlimxError(
            f"{path}: not readable as CSV ({error})", code="prompts.unreadable", about=str(path)
        ) from error


def _table_rows(path: Path, batches: Any) -> Iterator[Row]:
    try:
        import pyarrow
    except ImportError as error:
        raise SlimxError(
            f"{path}: parquet and Arrow files are read by pyarrow, which is not installed; pip install pyarrow",
            code="prompts.package",
            about="pyarrow",
        ) from error
    number = 0
    try:
        for batch in batches(path):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise SlimxError(
            f"{path}: cannot be read after row {number} ({raised(error)}); is it complete?",
            code="prompts.unreadable",
            about=str(path),
        ) from error


def _parquet(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=1024)


def _arrow(path: Path) -> Iterator[Any]:
    """The stream format, in which the `datasets` package saves."""
    import pyarrow

    with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
        yield from reader


def _hub_name(path: str, subset: str | None, split: str | None) -> tuple[str, str | None, str]:
    """Owner and name, subset and split that hf://OWNER/NAME or hf://OWNER/NAME/SUBSET/SPLIT means; train where no split
    is given."""
    parts = path.removeprefix(HUB).split("/")
    if not all(re.fullmatch(r"[\w.-]+", part) for part in parts) or len(parts) not in (2, 4):
        raise SlimxError(
            f"{path}: not of the form {HUB}OWNER/NAME or {HUB}OWNER/NAME/SUBSET/SPLIT", code="prompts.hub", about=path
        )
    if len(parts) == 4:
        subset, split = parts[2:]
    return "/".join(parts[:2]), subset, split or "train"


def _downloaded(name: str, subset: str | None, split: str) -> Path:
    """The directory of a data set of the Hub that has its parquet files, from the cache where they are there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise SlimxError(
            f"{HUB}{name}: downloads go through huggingface_hub, which is not installed; pip install huggingface_hub",
            code="prompts.package",
            about="huggingface_hub",
        ) from error
    patterns = f"{subset or '*'}/{split}/*.parquet"
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=CONVERTED, allow_patterns=patterns))
    except Exception as error:  # of many kinds: no network, no such data set, one that asks for a token
        told = " ".join(raised(error).split())[:200]
        raise SlimxError(
            f"{HUB}{name}: cannot be downloaded ({told}); download it where there is a network and give its directory",
            code="prompts.download",
            about=f"{HUB}{name}",
        ) from error
