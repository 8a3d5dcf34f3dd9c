"""Checks of the routed experts of trajectories before a trainer replays the routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimx.data.records import Trajectory
from slimx.errors import SlimxError


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Dimensions that a model requires of `routed_experts`."""

    layers: int
    """Number of decoder layers. Engines report experts for all of them, with arbitrary values for dense layers."""
    moe_layers: tuple[int, ...]
    """Indices of the MoE layers among all decoder layers of the model."""
    experts: int
    """Number of experts in an MoE layer."""
    topk: int
    """Number of experts selected for each token."""


def check_routes(trajectories: Sequence[Trajectory], shape: RouteShape) -> None:
    """Checks that `routed_experts` of every trajectory has `topk` different experts of the model for each input
    position and MoE layer.

    If not, raises SlimxError naming the first faulty trajectory and the layer."""
    for trajectory in trajectories:
        routes = trajectory.routed_experts
        expected = (len(trajectory.token_ids) - 1, shape.layers, shape.topk)
        if routes is None:
            raise SlimxError(
                f"trajectory {trajectory.id} has no routed_experts, which trainer.moe.routing_replay=R3 needs for "
                f"layers {shape.moe_layers[0]} to {shape.moe_layers[-1]}; return the completion's routed_experts from "
                "the generate hook, or set trainer.moe.routing_replay=none",
                code="routes.missing",
                about=trajectory.id,
            )
        if routes.shape != expected:
            raise SlimxError(
                f"trajectory {trajectory.id}: routed_experts has the shape {list(routes.shape)}, but its tokens and "
                f"the model's layers {shape.moe_layers[0]} to {shape.moe_layers[-1]} require {list(expected)} (tokens "
                "- 1, layers, experts per token); return the engine's routed_experts unchanged",
                code="routes.shape",
                about=trajectory.id,
            )
        _check_ids(trajectory.id, routes, shape)


def _check_ids(name: str, routes: np.ndarray, shape: RouteShape) -> None:
    # One plane of all positions and layers per top-k choice: comparing planes is ten times faster than sorting choices.
    planes = np.ascontiguousarray(np.moveaxis(routes[:, list(shape.moe_layers)], -1, 0))
    unknown: np.ndarray = np.any(planes >= shape.experts, axis=0)
    if planes.dtype.kind == "i":
        unknown |= np.any(planes < 0, axis=0)
    twice = np.zeros(planes.shape[1:], bool)
    for first in range(shape.topk):
        for second in range(first + 1, shape.topk):
            twice |= planes[first] == planes[second]
    wrong = unknown | twice
    if wrong.any():
        position, index = map(int, np.argwhere(wrong)[0])
        layer = shape.moe_layers[index]
        code = "routes.twice"
        problem = "an expert occurs twice"
        if unknown[position, index]:
            code = "routes.experts"
            problem = f"not all of them are experts from 0 to {shape.experts - 1}"
        raise SlimxError(
            f"trajectory {name}: layer {layer} routes token {position} to experts {routes[position, layer].tolist()} "
            f"({problem}), which trainer.moe.routing_replay=R3 cannot replay; return the engine's routes unchanged",
            code=code,
            about=name,
        )
