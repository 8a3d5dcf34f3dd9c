"""Files of a data set that is a directory: subsets and splits, shards, and columns that folders stand for."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from urllib.parse import unquote

from slimx.errors import SlimxError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Endings of files of prompts."""
NAMED = 6
"""Subsets and splits that a refusal names, at most."""
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""The value of a column that is null, in a folder's name."""
_SHARD = r"-\d+-of-\d+$"
_TABLE = r"\d+|data|part[-_.]?\d.*|data[-_.]\d+"
"""Names that tell files of one table apart, as pandas, Spark, Dask and DuckDB give them, and no split."""


def matching(pattern: Path) -> list[Path]:
    """Files that a pattern with *, ? or [...] names, in the order of their names; [] for a path without any."""
    if pattern.exists() or not glob.has_magic(str(pattern)):
        return []
    return sorted(Path(file) for file in glob.glob(str(pattern), recursive=True) if Path(file).is_file())


def chosen_files(directory: Path, subset: str | None, split: str | None) -> list[Path]:
    """The data files of one subset and split in a directory, in the order of their names. Raises SlimxError where there
    are none, or several subsets or splits to choose from."""
    files = sorted(
        file for file in directory.rglob("*") if file.suffix.lower() in SUFFIXES and not _is_note(file, directory)
    )
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
        if (split is None or _is_split(names[-1], split)) and (subset is None or subset in names[:-1])
    }
    if len(fitting) != 1:
        names = ["/".join(names) for names in (fitting or parts)]
        there = ", ".join(names[:NAMED]) + f" and {len(names) - NAMED} more" * (len(names) > NAMED)
        which = "several of" if fitting else "none of"
        raise SlimxError(
            f"{directory}: subset {subset or 'any'} and split {split or 'any'} mean {which} {there}; choose one with "
            "subset and split of an entry of rollout.sources, or name its files, such as "
            f"{directory}/{next(iter(fitting or parts))[-1]}*",
            code="prompts.split",
            about=str(directory),
        )
    return next(iter(fitting.values()))


def folder_columns(file: Path, directory: Path) -> dict[str, str | None]:
    """Columns whose value is in the name of a folder, as in level=hard/part-0.parquet; texts, and None for null."""
    columns = dict(name.split("=", 1) for name in _folders(file, directory) if "=" in name)
    return {name: None if value == NO_VALUE else unquote(value) for name, value in columns.items()}


def _folders(file: Path, directory: Path) -> tuple[str, ...]:
    return file.relative_to(directory).parts[:-1] if file.is_relative_to(directory) else ()


def _is_note(file: Path, directory: Path) -> bool:
    """True for what a data set holds beside its rows, and for what is hidden."""
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(directory).parts)
    return hidden or file.name in ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")


def _part_of(file: Path, directory: Path) -> tuple[str, ...]:
    """Folders of a file, and its split: test of test-00000-of-00001.parquet, the folder's name of 0000.parquet. Files
    below folders named COLUMN=VALUE are one table, whatever their names."""
    given = _folders(file, directory)
    folders = [name for name in given if name != "data" and "=" not in name]
    name = re.sub(_SHARD, "", file.stem)
    if len(folders) < len([each for each in given if each != "data"]) or re.fullmatch(_TABLE, name):
        return tuple(folders) or (directory.name,)
    return (*folders, name)


def _is_split(name: str, split: str) -> bool:
    """True for train where the split is train, and for NAME-train, as the `datasets` package calls what it caches."""
    return name == split or name.endswith(f"-{split}")
