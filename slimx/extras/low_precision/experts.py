"""Weights that INT4 rounds: the matrices of routed experts, as in Kimi-K2-Thinking's checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slimx.layout.parts import Part
from slimx.layout.table import Entry, Row, Table, stored


def rounds(row: Row) -> bool:
    """Returns True if INT4 rounds the tensors of `row`: matrices of one expert each that the checkpoint does not
    stack."""
    matrices = all(len(shape) == 2 for _, shape in row.sources)
    return row.per_expert and matrices and stored(row.names(0, 0)[0]).index is None


def experts(table: Table) -> Iterator[Entry]:
    """Tensors of the model that INT4 rounds."""
    return (entry for entry in table.entries() if rounds(entry.row))


def rounded_parts(table: Table, held: Iterable[Part]) -> list[Part]:
    """Those of a rank's parts `held` that INT4 rounds."""
    sources = {entry.sources for entry in experts(table)}
    return [part for part in held if part.sources in sources]
