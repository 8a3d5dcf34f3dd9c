"""Facts about models and directories, against which rules check a configuration (`slimx.config.rule`)."""

from __future__ import annotations

from pathlib import Path

from slimx.config.schema import Config
from slimx.data.routes import RouteShape
from slimx.json_types import Json
from slimx.layout.ranks import sizes_of
from slimx.models.families import ModelSpec, read_trunk


def model_facts(config: Config, spec: ModelSpec) -> Json:
    """Returns the facts that follow from the configuration and the model's config.json, by name: all sections, and the
    descriptions and parallel sizes of the model and of the critic (None without a critic)."""
    facts: Json = config.facts | {"spec": spec, "sizes": sizes_of(config.trainer)}
    if config.critic is None:
        return facts | dict.fromkeys(("critic_view", "critic_spec", "critic_sizes"))
    view = config.as_critic().trainer
    return facts | {"critic_view": view, "critic_spec": read_trunk(config.model), "critic_sizes": sizes_of(view)}


def weight_facts(config: Config) -> dict[str, Path | None]:
    """Returns the directories from which a run loads weights, by fact name; None for weights that the run does not
    load."""
    facts: dict[str, Path | None] = {
        "weights": Path(config.initial_weights),
        "adapters": None,
        "critic_weights": None,
        "teacher_weights": None,
    }
    if config.trainer.lora is not None and config.trainer.lora.load is not None:
        facts["adapters"] = Path(config.trainer.lora.load)
    if config.critic is not None:
        facts["critic_weights"] = Path(config.as_critic().initial_weights)
    if config.algorithm.teacher is not None:
        facts["teacher_weights"] = Path(config.algorithm.teacher)
    return facts


def route_shape(spec: ModelSpec) -> RouteShape:
    """Returns the shape of the model's expert routes: the numbers of layers, of MoE layers, of experts, and of experts
    per token. The number of MoE layers is 0 for a model without them."""
    fields = spec.transformer
    return RouteShape(
        layers=fields["num_layers"],
        moe_layers=spec.moe_layers,
        experts=spec.experts or 0,
        topk=fields.get("moe_router_topk") or 0,
    )
