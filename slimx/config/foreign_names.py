"""Names of keys and values in other frameworks. Aliases of parallel sizes are accepted as they are; for names in the
tables of installed packages, error messages suggest the slimx key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from slimx import entry_points
from slimx.errors import SlimxError
from slimx.json_types import Json

TABLES = "slimx.foreign_names"
"""Entry point group for tables of foreign names, which are modules that define the functions of `NameTable`."""

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
"""Aliases for keys of parallel sizes, as named in Megatron-LM and other frameworks: each dotted alias is mapped to the
last part of the slimx key. `*` matches any entry of a list."""
for _section in ("trainer", "critic.layout"):
    for _long, _short in _SIZES.items():
        ALIASES[f"{_section}.{_long}"] = _short
for _long in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
    ALIASES[f"rollout.engines.*.{_long}"] = _SIZES[_long]


class Counterpart(Protocol):
    """The slimx equivalent of a foreign name: one key with a value, several keys, or the reason why there is none."""

    @property
    def key(self) -> str:
        """Dotted key of slimx, with `*` for an entry of a list; "" if there is no single key."""

    @property
    def values(self) -> Mapping[str, str | Counterpart]:
        """Mapping from foreign values, in lower case, to the corresponding values of `key`, or to counterparts with
        another key where slimx sets the value elsewhere."""

    @property
    def closed(self) -> bool:
        """True if `values` lists every valid foreign value."""

    @property
    def note(self) -> str:
        """Explanation that is shown to the user; "" for no explanation."""

    @property
    def not_needed(self) -> bool:
        """True if slimx needs no setting for this name, because slimx always behaves that way or derives the value."""

    @property
    def sets(self) -> Mapping[str, str]:
        """Dotted keys and their values, if the foreign name corresponds to several keys; "VALUE" in a value stands for
        the foreign value."""

    def translate(self, value: str) -> str | Counterpart | None:
        """Returns the value of `key` that corresponds to the foreign `value`, or a counterpart with another key if
        slimx sets this value elsewhere; None if `value` is invalid."""


class NameTable(Protocol):
    """Interface of a module that maps the names of another framework to keys of slimx, registered as an entry point of
    `slimx.foreign_names`."""

    def of_key(self, name: str, value: str) -> Counterpart | None:
        """Returns the counterpart of the foreign dotted key `name` with the value `value`; None if the table lacks the
        key."""

    def of_flag(self, name: str, value: str) -> Counterpart | None:
        """Returns the counterpart of the command-line flag `name` (given without its dashes) with the value `value`;
        None if the table lacks the flag."""

    def of_word(self, key: str, word: str) -> str | Counterpart | None:
        """Returns the value of slimx's `key` that corresponds to `word`, the lower-case word for it in the other
        framework; None if the table lacks the word."""


def of_key(name: str, value: str) -> Counterpart | None:
    """Returns the counterpart of the foreign dotted key `name` with the value `value`. Uses the first table that
    contains `name`; None if none does."""
    for table in _tables():
        counterpart = table.of_key(name, value)
        if counterpart is not None:
            return counterpart
    return None


def of_flag(name: str, value: str) -> Counterpart | None:
    """Returns the counterpart of the command-line flag `name` (given without its dashes) with the value `value`. Uses
    the first table that contains the flag; None if none does."""
    for table in _tables():
        counterpart = table.of_flag(name, value)
        if counterpart is not None:
            return counterpart
    return None


def of_word(key: str, word: str) -> str | Counterpart | None:
    """Returns the value of slimx's `key` that corresponds to `word`, the lower-case word for it in another framework.
    Uses the first table that contains `word`; None if none does."""
    for table in _tables():
        counterpart = table.of_word(key, word)
        if counterpart is not None:
            return counterpart
    return None


def _tables() -> Iterable[NameTable]:
    return entry_points.load_all(TABLES).values()


def to_known_names(tree: object, where: str) -> None:
    """Renames the aliased keys of `tree` to the schema's names, in place.

    `tree`: plain values of a file or an override. `where` names the file or override in errors. Raises SlimxError if a
    key is set under both of its names."""
    for old, name in ALIASES.items():
        *path, last = old.split(".")
        new = ".".join([*path, name])
        for section in _sections(tree, path):
            if last not in section:
                continue
            if name in section:
                raise SlimxError(
                    f"{where}: {old} is an alias of {new}, but both keys are set; remove {old}",
                    code="config.two_names",
                    about=old,
                )
            section[name] = section.pop(last)


def _sections(tree: object, path: list[str]) -> Iterator[Json]:
    """Yields every mapping in `tree` at `path`, a sequence of keys in which `*` matches every entry of a list or
    mapping."""
    if not path:
        if isinstance(tree, dict):
            yield tree
        return
    first, *rest = path
    if first == "*" and isinstance(tree, list | dict):
        for entry in tree if isinstance(tree, list) else tree.values():
            yield from _sections(entry, rest)
    elif isinstance(tree, dict) and first in tree:
        yield from _sections(tree[first], rest)
