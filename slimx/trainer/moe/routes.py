"""Routes of micro-batches as tensors: the engine's, cut for this rank, and their differences from the trainer's.

Routes are integers [routers, t, k]: the experts of this rank's MoE layers (in the order of the forward pass) for the t
tokens of a micro-batch that remain after context and sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slimx.data.batch import MicroBatch
from slimx.errors import SlimxError


def engine_routes(batch: MicroBatch, layers: Sequence[int], *, experts: int, topk: int) -> np.ndarray:
    """Returns a micro-batch's routes for `layers` (global numbers), uint8 or int16 [routers, T, k]; padding is spread
    over all experts.

    Raises SlimxError if routes are missing for any other position, or have another shape."""
    count = len(batch.tokens)
    spread = (np.arange(count)[:, None] * topk + np.arange(topk)) % experts
    if not (known_routes(batch) | batch.padding).all():
        raise SlimxError(
            "trainer.moe.routing_replay=R3: a micro-batch has no routes of the engine; every trained trajectory "
            "needs routed_experts",
            code="routes.missing",
            about="routed_experts",
        )
    if batch.routed_experts is None:
        return np.broadcast_to(spread, (len(layers), count, topk)).astype(_dtype(experts))
    recorded = list(batch.route_layers or range(batch.routed_experts.shape[1]))
    missing = [layer for layer in layers if layer not in recorded]
    if missing:
        raise SlimxError(
            f"a micro-batch carries the engine's routes of layers {recorded[0]} to {recorded[-1]}, but this rank has "
            f"layer {missing[0]}; cut them for its pipeline stage",
            code="routes.layer",
            about=f"layer {missing[0]}",
        )
    if batch.routed_experts.shape[::2] != (count, topk):
        raise SlimxError(
            f"a micro-batch of {count} tokens carries routes of shape {list(batch.routed_experts.shape)} (tokens, "
            f"layers, experts) for a model with {topk} experts per token",
            code="routes.shape",
            about="routed_experts",
        )
    local = batch.routed_experts[:, [recorded.index(layer) for layer in layers]]
    routes = np.where(batch.padding[:, None, None], spread[:, None, :], local)
    return np.ascontiguousarray(routes.transpose(1, 0, 2)).astype(_dtype(experts))


def known_routes(batch: MicroBatch) -> np.ndarray:
    """Marks positions whose routes came with a micro-batch, bool [T]."""
    if batch.routed_experts is None:
        return np.zeros(len(batch.tokens), bool)
    return ~batch.padding if batch.routed is None else batch.routed


def _dtype(experts: int) -> type:
    return np.uint8 if experts <= 256 else np.int16


def differing(chosen: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    """Marks tokens for which any layer used another set of experts, bool [t]; both routes [routers, t, k]."""
    return (chosen.sort(-1).values != engine.sort(-1).values).any(-1).any(0)


def within_sequence(differs: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Marks positions that differ, or follow a differing one in their sequence, bool [T]: attention propagates it."""
    return torch.cat([part.cummax(0).values for part in differs.to(torch.uint8).split(lengths)]).bool()
