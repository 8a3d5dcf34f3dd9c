"""Routes, the experts chosen for each token: selects the engine's routes for this rank, and compares these routes with
the trainer's. The routes of a micro-batch are integers [routers, t, k]: the k experts that each of this rank's MoE
layers, in the order of the forward pass, uses for each of the t tokens that context and sequence parallelism assign to
this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slimx.data.batch import MicroBatch
from slimx.errors import SlimxError


def engine_routes(batch: MicroBatch, layers: Sequence[int], *, experts: int, topk: int) -> np.ndarray:
    """Returns the engine's routes in a micro-batch for `layers` (global indices), uint8 or int16 [layers, T, k].
    Padding tokens get routes that are distributed over all experts. Raises SlimxError if a token other than padding has
    no route, or if the routes do not fit the model."""
    count = len(batch.tokens)
    spread = (np.arange(count)[:, None] * topk + np.arange(topk)) % experts
    if not (known_routes(batch) | batch.padding).all():
        raise SlimxError(
            "trainer.moe.routing_replay is R3, but a micro-batch contains tokens without the engine's routes; set "
            "routed_experts in every trained trajectory, or set trainer.moe.routing_replay to R2 or none",
            code="routes.missing",
            about="routed_experts",
        )
    if batch.routed_experts is None:
        return np.broadcast_to(spread, (len(layers), count, topk)).astype(_dtype(experts))
    recorded = list(batch.route_layers or range(batch.routed_experts.shape[1]))
    missing = [layer for layer in layers if layer not in recorded]
    if missing:
        raise SlimxError(
            f"a micro-batch contains the engine's routes of layers {recorded[0]} to {recorded[-1]}, but not of layer "
            f"{missing[0]}, which this rank has; select the routes of the rank's pipeline stage",
            code="routes.layer",
            about=f"layer {missing[0]}",
        )
    if batch.routed_experts.shape[::2] != (count, topk):
        raise SlimxError(
            f"a micro-batch of {count} tokens contains routes of shape {list(batch.routed_experts.shape)} (tokens, "
            f"layers, experts per token), but the model routes each token to {topk} experts; use routes of the same "
            "tokens and model",
            code="routes.shape",
            about="routed_experts",
        )
    local = batch.routed_experts[:, [recorded.index(layer) for layer in layers]]
    routes = np.where(batch.padding[:, None, None], spread[:, None, :], local)
    return np.ascontiguousarray(routes.transpose(1, 0, 2)).astype(_dtype(experts))


def known_routes(batch: MicroBatch) -> np.ndarray:
    """Returns a mask of the tokens for which the micro-batch contains the engine's routes, bool [T]."""
    if batch.routed_experts is None:
        return np.zeros(len(batch.tokens), bool)
    return ~batch.padding if batch.routed is None else batch.routed


def _dtype(experts: int) -> type:
    return np.uint8 if experts <= 256 else np.int16


def differing(chosen: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the tokens for which any layer uses different sets of experts according to the two routes, bool
    [t]. `chosen` and `engine`: the trainer's and the engine's routes, both [routers, t, k]."""
    return (chosen.sort(-1).values != engine.sort(-1).values).any(-1).any(0)


def within_sequence(differs: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Extends the marks in `differs`, bool [T], to all later positions of the same sequence, because through attention
    these positions depend on the marked one. `lengths`: lengths of the sequences."""
    return torch.cat([part.cummax(0).values for part in differs.to(torch.uint8).split(lengths)]).bool()
