"""Selects parameters by glob patterns over their names, using a family's weight table before the model exists."""

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
    """Returns the parameters of the whole model that match any of `patterns`, each identified by the checkpoint tensors
    that it contains (`Part.sources`).

    A pattern is a glob (`*`, `?`, `[...]`) over full parameter names: Megatron's, in which layers and experts are
    numbered over the whole model, or Hugging Face's, in which all experts in a stack share one name. Raises SlimxError,
    naming the configuration key `key`, if a pattern matches nothing (the message suggests the nearest name) or if the
    patterns match only some of the checkpoint tensors of a fused parameter."""
    if not patterns:
        return frozenset()
    selected: set[Sources] = set()
    used: set[str] = set()
    for entry in table.entries():
        by_name = _matching(patterns, megatron_name(table, entry))
        by_source = {source: _matching(patterns, stored(source).name) for source in entry.sources}
        used |= by_name.union(*by_source.values())
        matched = [source for source in entry.sources if by_source[source]]
        missing = [source for source in entry.sources if not by_source[source]]
        if by_name or not missing:
            selected.add(entry.sources)
        elif matched:
            raise SlimxError(
                f"{key} matches {matched[0]} but not {missing[0]}, although these tensors are parts of one parameter "
                f"({megatron_name(table, entry)}); match all of {', '.join(entry.sources)}, or none of these tensors",
                code="layout.pattern_part",
                about=key,
            )
    for pattern in patterns:
        if pattern not in used:
            raise SlimxError(
                f"{key} contains the pattern {pattern!r}, which matches no parameter; {_near(table, pattern)}",
                code="layout.pattern",
                about=key,
            )
    return frozenset(selected)


def _matching(patterns: Sequence[str], name: str) -> set[str]:
    return {pattern for pattern in patterns if fnmatchcase(name, pattern)}


def names_of(selected: Collection[Sources], parts: Iterable[Part]) -> frozenset[str]:
    """Returns the names of those parameters among a rank's `parts` that are in `selected`, the result of `select`.
    Copies, such as a tied output layer, are selected with their original."""
    return frozenset(part.name for part in parts if part.sources in selected)


def megatron_name(table: Table, entry: Entry) -> str:
    """Returns the name of the entry's parameter in a Megatron model on a single rank. Multi-token prediction layers are
    numbered from 0."""
    layer = entry.layer - table.layers if entry.row.stage == "mtp" else entry.layer
    return entry.row.name.format(layer=layer, expert=entry.expert)


def _near(table: Table, pattern: str) -> str:
    # Names that differ only in layer or expert are compared once.
    kinds: dict[str, str] = {}
    for entry in table.entries():
        for name in (megatron_name(table, entry), *(stored(source).name for source in entry.sources)):
            kinds.setdefault(re.sub(r"\d+", "*", name), name)
    near = difflib.get_close_matches(re.sub(r"\d+", "*", pattern), kinds, n=1, cutoff=0.0)
    return f"did you mean {kinds[near[0]]}?"
