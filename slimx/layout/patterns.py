"""Globs over parameter names, matched against a family's weight table before any model exists."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from slimx.errors import SlimxError
from slimx.layout.parts import Part
from slimx.layout.table import Entry, Table, stored

Sources = tuple[str, ...]


def select(table: Table, patterns: Sequence[str], key: str) -> frozenset[Sources]:
    """The parameters of the whole model that any of `patterns` matches, by their `Part.sources`.

    A pattern is a glob (`*`, `?`, `[...]`) over a whole name: Megatron's, with layers and experts numbered over the
    whole model, or Hugging Face's (of a stack of experts, all of them). Raises SlimxError naming `key` for a pattern
    that matches nothing, with the nearest name, and for one that matches a part of a fused parameter only.
    """
    found: set[Sources] = set()
    used: set[str] = set()
    for entry in table.entries() if patterns else ():
        own = {pattern for pattern in patterns if fnmatchcase(megatron_name(table, entry), pattern)}
        by_source = {source: {p for p in patterns if fnmatchcase(stored(source).name, p)} for source in entry.sources}
        used |= own.union(*by_source.values())
        missing = [source for source, matching in by_source.items() if not matching]
        if own or not missing:
            found.add(entry.sources)
        elif len(missing) < len(entry.sources):
            matched = next(source for source, matching in by_source.items() if matching)
            raise SlimxError(
                f"{key} matches {matched} but not {missing[0]}, and both are one parameter, "
                f"{megatron_name(table, entry)}; match all of {', '.join(entry.sources)} or none",
                code="layout.pattern_part",
                about=key,
            )
    for pattern in patterns:
        if pattern not in used:
            raise SlimxError(
                f"{key} holds {pattern!r}, which matches no parameter of the model; {_near(table, pattern)}",
                code="layout.pattern",
                about=key,
            )
    return frozenset(found)


def names_of(selected: Collection[Sources], held: Iterable[Part]) -> frozenset[str]:
    """Names of selected parameters among a rank's parts. Copies (a tied output layer) go with their original."""
    return frozenset(part.name for part in held if part.sources in selected)


def megatron_name(table: Table, entry: Entry) -> str:
    """The parameter's name in an undivided Megatron model. Layers of multi-token prediction count from 0."""
    layer = entry.layer - table.layers if entry.row.stage == "mtp" else entry.layer
    return entry.row.name.format(layer=layer, expert=entry.expert)


def _near(table: Table, pattern: str) -> str:
    # Layers and experts repeat the same names: one of each kind is compared.
    kinds: dict[str, str] = {}
    for entry in table.entries():
        for name in (megatron_name(table, entry), *(stored(source).name for source in entry.sources)):
            kinds.setdefault(re.sub(r"\d+", "*", name), name)
    near = difflib.get_close_matches(re.sub(r"\d+", "*", pattern), kinds, n=1, cutoff=0.0)
    return f"did you mean {kinds[near[0]]}?"
