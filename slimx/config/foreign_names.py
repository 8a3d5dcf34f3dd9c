"""Names that other frameworks have for keys and values: longer ones of the same sizes, which are taken for the keys,
and those that an installed package knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from slimx import entry_points
from slimx.errors import SlimxError

TABLES = "slimx.foreign_names"
"""Group of entry points: modules with functions of the names `of_key`, `of_flag` and `of_word`, as below."""

_SIZES = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "virtual_pipeline_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "data_parallel_size": "data",
    "expert_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
ALIASES = {
    **{f"{section}.{long}": short for section in ("trainer", "critic.layout") for long, short in _SIZES.items()},
    **{
        f"rollout.engines.*.{long}": _SIZES[long]
        for long in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
    },
}
"""Longer names, which Megatron and others have; `*` stands for each entry of a list."""


class Meaning(Protocol):
    """The meaning of a foreign name: a key with a value, several of them, or a reason why there is none."""

    key: str
    """Key of slimx, `*` for an entry of a list; "" for none."""
    values: Mapping[str, str | Meaning]
    """Value here, or another meaning, by the foreign value in small letters."""
    closed: bool
    """True if `values` has all values that mean anything."""
    note: str
    needless: bool
    """True if nothing is to be written."""
    sets: Mapping[str, str]
    """Several keys with their values."""

    def of(self, value: str) -> str | Meaning | None:
        """Return the value here, or another meaning, for a foreign value; None: the name does not take it."""
        ...


def of_key(name: str, value: str) -> Meaning | None:
    """Returns the meaning of a dotted key with `value`; None: no table has it."""
    return _first("of_key", name, value)


def of_flag(name: str, value: str) -> Meaning | None:
    """Returns the meaning of a flag with `value`, without its dashes; None: no table has it."""
    return _first("of_flag", name, value)


def of_word(key: str, word: str) -> str | Meaning | None:
    """Returns the value of `key` that people write as `word`, in small letters; None: no table has it."""
    return _first("of_word", key, word)


def _first(function: str, *arguments: str) -> str | Meaning | None:
    found = (getattr(table, function)(*arguments) for table in entry_points.load_all(TABLES).values())
    return next((each for each in found if each is not None), None)


def to_known_names(tree: Any, where: str) -> None:
    """Give the keys in a tree of plain values, that of a file or an override, the names that the schema knows.

    Raises SlimxError, naming `where`, for a key that is given twice."""
    for old, name in ALIASES.items():
        *path, last = old.split(".")
        new = ".".join([*path, name])
        for section in _sections(tree, path):
            if last not in section:
                continue
            if name in section:
                raise SlimxError(
                    f"{where}: {old} and {new} are one key; leave {old} out", code="config.two_names", about=old
                )
            section[name] = section.pop(last)


def _sections(tree: Any, path: list[str]) -> Iterator[dict[str, Any]]:
    """Mappings that stand at `path`."""
    if not path:
        if isinstance(tree, dict):
            yield tree
        return
    first, *rest = path
    if first == "*":
        entries = tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else ()
        for entry in entries:
            yield from _sections(entry, rest)
    elif isinstance(tree, dict) and first in tree:
        yield from _sections(tree[first], rest)
