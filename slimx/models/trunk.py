"""A model without its output layer: what a value model takes from a policy's checkpoint."""

from __future__ import annotations

from slimx.config.sections.run import Model
from slimx.models.families import ModelSpec, load_family, read_model
from slimx.models.headless import without_output_layer


def read_trunk(model: Model) -> ModelSpec:
    """The policy's `model` as `configured_model` reads it, without layers of multi-token prediction and output layer; a
    checkpoint may still hold their tensors."""
    family = load_family(model.family) if model.family else None
    return without_output_layer(read_model(model.path, family=family))
