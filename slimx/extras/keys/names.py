"""Other names of keys: aliases, and names in other frameworks."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from slimx.config.foreign_names import ALIASES
from slimx.extras.foreign.meaning import Meaning, Table
from slimx.extras.foreign.megatron import MEGATRON
from slimx.extras.foreign.openrlhf import OPENRLHF
from slimx.extras.foreign.slime import SLIME
from slimx.extras.foreign.trl import TRL
from slimx.extras.foreign.verl import VERL

PROGRAMS: Sequence[tuple[str, Table, bool]] = (
    ("slime", SLIME, True),
    ("Megatron-LM", MEGATRON, True),
    ("verl", VERL, False),
    ("TRL", TRL, False),
    ("OpenRLHF", OPENRLHF, True),
)
"""Frameworks with their tables of names, and True if the names are command-line flags."""


@functools.cache
def foreign_names() -> Mapping[str, Sequence[str]]:
    """Returns the names in other frameworks, such as "slime --lr", of every key that has one, by dotted key."""
    found: dict[str, list[str]] = defaultdict(list)
    for program, table, flags in PROGRAMS:
        for name, entry in table.items():
            meaning = Meaning(entry) if isinstance(entry, str) else entry
            shown = f"--{name.replace('_', '-')}" if flags else name
            for key in meaning.sets or {meaning.key: ""}:
                found[key].append(f"{program} {shown}")
    found.pop("", None)
    return found


def keys_of(name: str) -> frozenset[str]:
    """Returns the dotted keys that the foreign `name`, without dashes, may stand for in any framework."""
    found: set[str] = set()
    for _, table, _ in PROGRAMS:
        entry = table.get(name, "")
        meaning = Meaning(entry) if isinstance(entry, str) else entry
        found |= {meaning.key, *meaning.sets}
    return frozenset(found)


@functools.cache
def plain_names() -> frozenset[str]:
    """Returns all names in other frameworks, without dashes."""
    return frozenset(name for _, table, _ in PROGRAMS for name in table if "*" not in name)


def aliases_of(key: str) -> list[str]:
    """Returns the other names that the configuration accepts for the dotted `key`."""
    section, _, last = key.rpartition(".")
    names = []
    for alias, name in ALIASES.items():
        above, _, other = alias.rpartition(".")
        if name == last and above == section:
            names.append(other)
    return names
