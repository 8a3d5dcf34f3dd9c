"""Frozen parameters: no gradient, no optimizer state; they still publish, export and stand in checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from slimx.layout.parts import Part
from slimx.layout.patterns import Sources


def names_of(selected: Collection[Sources], held: Iterable[Part]) -> frozenset[str]:
    """Names of selected parameters in a rank's own modules. Copies (a tied output layer) go with their original."""
    return frozenset(part.name for part in held if part.sources in selected)


def freeze(module: torch.nn.Module, names: Collection[str], *, recompute: bool) -> None:
    """Freeze the parameters `names` of one chunk, before it is wrapped for data parallelism.

    `recompute`: whether the backward pass computes parts of the model again.
    """
    parameters = dict(module.named_parameters())
    for name in names:
        if name in parameters:  # an expert's selection bias is a buffer and has no gradient anyway
            parameters[name].requires_grad_(False)
    embedding = getattr(module, "embedding", None)
    trainable = any(parameter.requires_grad for parameter in parameters.values())
    if embedding is None or any(parameter.requires_grad for parameter in embedding.parameters()):
        return
    # Recomputed layers whose input needs no gradient get none themselves (torch's checkpoint goes by its inputs), and a
    # pipeline stage must have an output that the next stage's gradient can enter. Elsewhere the backward pass may end
    # at the first trainable layer.
    if recompute or not trainable:
        embedding.register_forward_hook(_require_gradient)


def _require_gradient(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
