"""Files of a data set in a directory: subsets and splits, shards, and columns encoded in folder names."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from urllib.parse import unquote

from slimx.errors import SlimxError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Suffixes of prompt files, in lower case."""
NAMED = 6
"""Maximum number of subsets and splits that an error lists."""
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""Text that represents null in a folder name."""
_SHARD = r"-\d+-of-\d+$"
_TABLE = r"\d+|data|part[-_.]?\d.*|data[-_.]\d+"
"""Pattern of the names that pandas, Spark, Dask and DuckDB give to the files of one table; these names are not
splits."""


def matching(pattern: Path) -> list[Path]:
    """Returns the files that match a pattern with *, ? or [...], sorted by name; [] if `pattern` is an existing path or
    contains none of these characters."""
    if pattern.exists() or not glob.has_magic(str(pattern)):
        return []
    matches = [Path(name) for name in glob.glob(str(pattern), recursive=True)]
    return sorted(path for path in matches if path.is_file())


def chosen_files(directory: Path, subset: str | None, split: str | None) -> list[Path]:
    """Returns the data files in a directory that belong to one subset and split, sorted by name; None matches any
    subset or split. Raises SlimxError if no files match, or if files of several subsets or splits do."""
    files = []
    for file in sorted(directory.rglob("*")):
        if file.suffix.lower() in SUFFIXES and not _is_note(file, directory):
            files.append(file)
    if not files:
        raise SlimxError(
            f"{directory} contains no file whose name ends in {' or '.join(SUFFIXES)}; give a prompt file, or a "
            "directory of prompt files",
            code="prompts.unreadable",
            about=str(directory),
        )
    parts: dict[tuple[str, ...], list[Path]] = {}
    for file in files:
        parts.setdefault(_part_of(file, directory), []).append(file)
    matches: dict[tuple[str, ...], list[Path]] = {}
    for part, part_files in parts.items():
        fits_split = split is None or _is_split(part[-1], split)
        if fits_split and (subset is None or subset in part[:-1]):
            matches[part] = part_files
    if len(matches) != 1:
        names = ["/".join(part) for part in (matches or parts)]
        listed = ", ".join(names[:NAMED])
        if len(names) > NAMED:
            listed += f" and {len(names) - NAMED} more"
        which = "match several of" if matches else "match none of"
        raise SlimxError(
            f"{directory}: subset={subset or 'any'} and split={split or 'any'} {which} {listed}; select one split with "
            "subset and split in the entry of rollout.sources, or give its files, such "
            f"as {directory}/{next(iter(matches or parts))[-1]}*",
            code="prompts.split",
            about=str(directory),
        )
    return next(iter(matches.values()))


def folder_columns(file: Path, directory: Path) -> dict[str, str | None]:
    """Returns the columns that are encoded in the names of the folders between `directory` and `file`, as in
    level=hard/part-0.parquet. The value is None for null."""
    columns: dict[str, str | None] = {}
    for folder in _folders(file, directory):
        name, equals, value = folder.partition("=")
        if value == NO_VALUE:
            columns[name] = None
        elif equals:
            columns[name] = unquote(value)
    return columns


def _folders(file: Path, directory: Path) -> tuple[str, ...]:
    return file.relative_to(directory).parts[:-1] if file.is_relative_to(directory) else ()


def _is_note(file: Path, directory: Path) -> bool:
    """Returns True for hidden files, and for files that describe a data set instead of containing rows."""
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(directory).parts)
    return hidden or file.name in ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")


def _part_of(file: Path, directory: Path) -> tuple[str, ...]:
    """Returns the names of a file's folders, which identify its subset, followed by the name of its split if the file
    name contains one, such as test in test-00000-of-00001.parquet but none in 0000.parquet. Files in folders named
    COLUMN=VALUE are one table, whatever their names."""
    named_folders = [name for name in _folders(file, directory) if name != "data"]
    folders = [name for name in named_folders if "=" not in name]
    name = re.sub(_SHARD, "", file.stem)
    if len(folders) < len(named_folders) or re.fullmatch(_TABLE, name):
        return tuple(folders) or (directory.name,)
    return (*folders, name)


def _is_split(name: str, split: str) -> bool:
    """Returns True if `name` is the split's name, or ends with it after a hyphen, as cache files of the `datasets`
    package do."""
    return name == split or name.endswith(f"-{split}")
