"""Routed experts of trajectories: whether a trainer can replay them, and the part that each pipeline stage needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slimx.data.batch import MicroBatch
from slimx.data.records import Trajectory
from slimx.errors import SlimxError


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Shape of the routes of a model."""

    layers: int
    """Decoder layers; engines report all of them, with anything for dense ones."""
    moe_layers: tuple[int, ...]
    """Global numbers, from 0, of those with experts."""
    experts: int
    topk: int
    """Experts of each token."""


def check_routes(trajectories: Sequence[Trajectory], shape: RouteShape) -> None:
    """Check that every trajectory carries a valid route for each of its input positions and MoE layers.

    Raises SlimxError naming the first trajectory that does not, and the layer."""
    for trajectory in trajectories:
        routes, wanted = trajectory.routed_experts, (len(trajectory.token_ids) - 1, shape.layers, shape.topk)
        if routes is None:
            raise SlimxError(
                f"trajectory {trajectory.id} carries no routed_experts, which trainer.moe.routing_replay=R3 needs "
                f"for layers {shape.moe_layers[0]} to {shape.moe_layers[-1]}; let its generate hook "
                "keep the completion's, or set trainer.moe.routing_replay=none",
                code="routes.missing",
                about=trajectory.id,
            )
        if routes.shape != wanted:
            raise SlimxError(
                f"trajectory {trajectory.id}: routed_experts has the shape {list(routes.shape)}, but its tokens and "
                f"the model's layers {shape.moe_layers[0]} to {shape.moe_layers[-1]} want {list(wanted)} (tokens - 1, "
                "layers, experts per token)",
                code="routes.shape",
                about=trajectory.id,
            )
        _check_ids(trajectory.id, routes, shape)


def _check_ids(name: str, routes: np.ndarray, shape: RouteShape) -> None:
    # One plane of all positions and layers per choice: pairs compare ten times faster than sorted choices.
    planes = np.ascontiguousarray(np.moveaxis(routes[:, list(shape.moe_layers)], -1, 0))
    unknown = (planes >= shape.experts).any(0)
    if planes.dtype.kind == "i":
        unknown |= (planes < 0).any(0)
    twice = np.zeros(planes.shape[1:], bool)
    for first in range(shape.topk):
        for second in range(first + 1, shape.topk):
            twice |= planes[first] == planes[second]
    if (wrong := unknown | twice).any():
        position, index = map(int, np.argwhere(wrong)[0])
        layer = shape.moe_layers[index]
        code, problem = "routes.twice", "an expert twice"
        if unknown[position, index]:
            code, problem = "routes.experts", f"not all of them are experts from 0 to {shape.experts - 1}"
        raise SlimxError(
            f"trajectory {name}: layer {layer} was routed to {routes[position, layer].tolist()} at token {position}: "
            f"{problem}; trainer.moe.routing_replay=R3 cannot replay it",
            code=code,
            about=name,
        )


def for_stage(shard: Sequence[Any], layers: Sequence[int]) -> list[Any]:
    """A data-parallel rank's micro-batches, or lists of them by update, with the routes of `layers` (global numbers)
    only."""
    return [_cut(part, layers) if isinstance(part, MicroBatch) else for_stage(part, layers) for part in shard]


def _cut(batch: MicroBatch, layers: Sequence[int]) -> MicroBatch:
    if batch.routed_experts is None:
        return batch
    routes = np.ascontiguousarray(batch.routed_experts[:, list(layers)])
    return replace(batch, routed_experts=routes, route_layers=tuple(layers))
