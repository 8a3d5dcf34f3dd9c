"""Names of keys and values in other frameworks: aliases of parallel sizes, which are accepted, and the names in tables
of installed packages, which are suggested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from slimx import entry_points
from slimx.errors import SlimxError
from slimx.json_types import Json

TABLES = "slimx.foreign_names"
"""Group of entry points: modules with the functions of `NameTable`."""

_SIZES = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "virtual_pipeline_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "data_parallel_size": "data",
    "expert_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
ALIASES: dict[str, str] = {}
"""Aliases of keys, as in Megatron-LM and other frameworks; `*` stands for each entry of a list."""
for _section in ("trainer", "critic.layout"):
    for _long, _short in _SIZES.items():
        ALIASES[f"{_section}.{_long}"] = _short
for _long in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
    ALIASES[f"rollout.engines.*.{_long}"] = _SIZES[_long]


class Counterpart(Protocol):
    """Counterpart of a foreign name: a key with a value, several of them, or the reason why there is none."""

    @property
    def key(self) -> str:
        """Key of slimx, `*` for an entry of a list; "": none."""
        ...

    @property
    def values(self) -> Mapping[str, str | Counterpart]:
        """Value of the key, or another counterpart, by the foreign value in lower case."""
        ...

    @property
    def closed(self) -> bool:
        """True if `values` has all values that are valid."""
        ...

    @property
    def note(self) -> str:
        """Explanation for the user; "": none."""
        ...

    @property
    def not_needed(self) -> bool:
        """True if no key is needed."""
        ...

    @property
    def sets(self) -> Mapping[str, str]:
        """Several keys with their values."""
        ...

    def translate(self, value: str) -> str | Counterpart | None:
        """Returns the value of the key, or another counterpart, for a foreign value; None: the value is invalid."""
        ...


class NameTable(Protocol):
    """Module with foreign names, an entry point of `slimx.foreign_names`."""

    def of_key(self, name: str, value: str) -> Counterpart | None:
        """Returns the counterpart of a dotted key with `value`; None: it is unknown."""
        ...

    def of_flag(self, name: str, value: str) -> Counterpart | None:
        """Returns the counterpart of a flag, without its dashes, with `value`; None: it is unknown."""
        ...

    def of_word(self, key: str, word: str) -> str | Counterpart | None:
        """Returns the value of `key` that users write as `word`, in lower case; None: it is unknown."""
        ...


def of_key(name: str, value: str) -> Counterpart | None:
    """Returns the first table's counterpart of a dotted key with `value`; None: no table has it."""
    for table in _tables():
        counterpart = table.of_key(name, value)
        if counterpart is not None:
            return counterpart
    return None


def of_flag(name: str, value: str) -> Counterpart | None:
    """Returns the first table's counterpart of a flag, without its dashes, with `value`; None: no table has it."""
    for table in _tables():
        counterpart = table.of_flag(name, value)
        if counterpart is not None:
            return counterpart
    return None


def of_word(key: str, word: str) -> str | Counterpart | None:
    """Returns the value of `key` that users write as `word`, in lower case; None: no table has it."""
    for table in _tables():
        counterpart = table.of_word(key, word)
        if counterpart is not None:
            return counterpart
    return None


def _tables() -> Iterable[NameTable]:
    return entry_points.load_all(TABLES).values()


def to_known_names(tree: object, where: str) -> None:
    """Renames aliases of keys in `tree`, the plain values of a file or an override, to the schema's names.

    Raises SlimxError, naming `where`, for a key that is set twice."""
    for old, name in ALIASES.items():
        *path, last = old.split(".")
        new = ".".join([*path, name])
        for section in _sections(tree, path):
            if last not in section:
                continue
            if name in section:
                raise SlimxError(
                    f"{where}: {old} and {new} are the same key; leave {old} out", code="config.two_names", about=old
                )
            section[name] = section.pop(last)


def _sections(tree: object, path: list[str]) -> Iterator[Json]:
    """Yields the mappings at `path`."""
    if not path:
        if isinstance(tree, dict):
            yield tree
        return
    first, *rest = path
    if first == "*" and isinstance(tree, list):
        for entry in tree:
            yield from _sections(entry, rest)
    elif first == "*" and isinstance(tree, dict):
        for entry in tree.values():
            yield from _sections(entry, rest)
    elif isinstance(tree, dict) and first in tree:
        yield from _sections(tree[first], rest)
