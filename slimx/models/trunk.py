"""A model without its output layer: what a value model takes from a policy's checkpoint."""

from __future__ import annotations

from dataclasses import replace

from slimx.models.families import ModelSpec, read_model

OUTPUT_LAYER = "output_layer.weight"
"""Its name in every family's table: megatron-core's."""


def read_trunk(path: str) -> ModelSpec:
    """Read `path`/config.json as `read_model` does, without layers of multi-token prediction and output layer; a
    checkpoint may still hold their tensors."""
    spec = read_model(path)
    table = spec.table
    rows = tuple(
        # The second copy of a tied embedding is the output layer.
        replace(row, copies=tuple(copy for copy in row.copies if copy[1] != OUTPUT_LAYER))
        for row in table.rows
        if row.name != OUTPUT_LAYER
    )
    unused = {name: shape for row in table.rows if row.name == OUTPUT_LAYER for name, shape in row.sources}
    aliases = {name: original for name, original in table.aliases.items() if original not in unused}
    shapes = table.checkpoint()
    unused |= {name: shapes[original] for name, original in table.aliases.items() if original in unused}
    return replace(
        spec,
        table=replace(table, rows=rows, aliases=aliases, frozen={**table.frozen, **unused}),
        gpt={**spec.gpt, "share_embeddings_and_output_weights": False},
    )
