"""A model without its output layer: what a value model takes from a policy's checkpoint."""

from __future__ import annotations

from dataclasses import replace

from slimx.config.sections.run import Model
from slimx.models.families import ModelSpec, load_family, read_model

OUTPUT_LAYER = "output_layer.weight"
"""Name of the output layer in every family's table: megatron-core's."""


def read_trunk(model: Model) -> ModelSpec:
    """The policy's `model` as `configured_model` reads it, without layers of multi-token prediction and output layer; a
    checkpoint may still hold their tensors."""
    family = load_family(model.family) if model.family else None
    spec = read_model(model.path, family=family)
    table = spec.table
    rows = tuple(
        # The second copy of a tied embedding is the output layer.
        replace(row, copies=tuple(copy for copy in row.copies if copy[1] != OUTPUT_LAYER))
        for row in table.rows
        if row.name != OUTPUT_LAYER
    )
    unused = {name: shape for row in table.rows if row.name == OUTPUT_LAYER for name, shape in row.sources}
    aliases = {name: original for name, original in table.aliases.items() if original not in unused}
    shapes = table.checkpoint_shapes()
    unused |= {name: shapes[original] for name, original in table.aliases.items() if original in unused}
    return replace(
        spec,
        table=replace(table, rows=rows, aliases=aliases, frozen={**table.frozen, **unused}),
        gpt={**spec.gpt, "share_embeddings_and_output_weights": False},
    )
