"""Checkpoints of vision-language models as Megatron-Bridge stores them. Keys of the language model begin with
`language_model.`, and a vision tower may consist of megatron-core's layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

from slimx.layout.table import Row, Table
from slimx.models.families import ModelSpec
from slimx.models.fields import HfConfig

TEXT = "language_model."
"""Prefix of the keys of the language model."""


@runtime_checkable
class BridgeFamily(Protocol):
    """Family whose models Megatron-Bridge stores under other keys than megatron-core's GPTModel."""

    def bridge_tower(self, hf: HfConfig) -> dict[str, Row]:
        """Returns, for each row of the vision tower in the trainer's weight table, by its name, the row of the tensor
        that Megatron-Bridge stores instead."""
        ...


def bridge_table(spec: ModelSpec) -> Table | None:
    """Returns the weight table of Megatron-Bridge's checkpoints of the model, with rows in the order of the trainer's
    table; None if its keys are those of the trainer's table."""
    if not isinstance(spec.family, BridgeFamily):
        return None
    tower = spec.family.bridge_tower(spec.hf)
    rows = [tower.get(row.name) or _prefixed(row) for row in spec.table.rows]
    return replace(spec.table, rows=tuple(rows))


def _prefixed(row: Row) -> Row:
    copies = tuple((stage, TEXT + name) for stage, name in row.copies)
    return replace(row, name=TEXT + row.name, copies=copies)
