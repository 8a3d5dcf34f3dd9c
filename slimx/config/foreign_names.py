"""Names that other frameworks have for keys and values, as far as an installed package knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from slimx import entry_points

TABLES = "slimx.foreign_names"
"""Group of entry points: modules with functions of the names `of_key`, `of_flag` and `of_word`, as below."""


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
