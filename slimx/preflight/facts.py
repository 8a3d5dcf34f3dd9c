"""Facts that rules ask for (`slimx.config.rule`), of a model and of directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from slimx.data.routes import RouteShape
from slimx.layout.ranks import sizes_of
from slimx.models.families import ModelSpec, read_trunk


def model_facts(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """Facts that the configuration and the model's config.json bring."""
    view = None if config.critic is None else config.as_critic().trainer
    return config.sections | {
        "spec": spec,
        "sizes": sizes_of(config.trainer),
        "critic_view": view,
        "critic_spec": None if view is None else read_trunk(config.model),
        "critic_sizes": None if view is None else sizes_of(view),
    }


def weight_facts(config: Config) -> dict[str, Any]:
    """Facts of the directories that initial weights are read from."""
    teacher, adapted = config.algorithm.teacher, config.trainer.lora
    return {
        "weights": Path(config.initial_weights),
        "adapters": None if adapted is None or adapted.load is None else Path(adapted.load),
        "critic_weights": None if config.critic is None else Path(config.as_critic().initial_weights),
        "teacher_weights": None if teacher is None else Path(teacher),
    }


def route_shape(spec: ModelSpec) -> RouteShape:
    """The shape of this model's routes; one without MoE layers has none."""
    fields = spec.transformer
    return RouteShape(
        layers=fields["num_layers"],
        moe_layers=spec.moe_layers,
        experts=spec.experts or 0,
        topk=fields.get("moe_router_topk") or 0,
    )
