"""The shape of a model's routes."""

from __future__ import annotations

from slimx.data.routes import RouteShape
from slimx.models.families import ModelSpec


def route_shape(spec: ModelSpec) -> RouteShape:
    """The shape of this model's routes; one without MoE layers has none."""
    fields = spec.transformer
    return RouteShape(
        layers=fields["num_layers"],
        moe_layers=spec.moe_layers,
        experts=spec.experts or 0,
        topk=fields.get("moe_router_topk") or 0,
    )
