"""Takes the output layer out of a model's specification: what value and reward models have of a policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

OUTPUT_LAYER = "output_layer.weight"
"""Name of the output layer in every family's table: megatron-core's."""

SCORE = "score.weight"
"""Name of a reward model's head in transformers and SGLang, which a checkpoint may hold in the place of it."""


def without_output_layer(spec: Any) -> Any:
    """The `ModelSpec` without its output layer; a checkpoint may still hold the tensor, or
    that of a reward model's head."""
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
    unused[SCORE] = (1, spec.transformer["hidden_size"])
    return replace(
        spec,
        table=replace(table, rows=rows, aliases=aliases, frozen={**table.frozen, **unused}),
        gpt={**spec.gpt, "share_embeddings_and_output_weights": False},
    )
