"""Rules about what `trainer.moe` needs of a model, and the shape of its routes."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.trainer import Trainer
from slimx.data.routes import RouteShape
from slimx.models.families import ModelSpec


@rule("routing.moe_layers", about="trainer.moe")
def has_routers(trainer: Trainer, spec: ModelSpec) -> Iterator[Told]:
    moe = trainer.moe
    asked = {
        "routing_replay": moe.routing_replay != "none",
        "aux_loss_coef": moe.aux_loss_coef > 0,
        "z_loss_coef": moe.z_loss_coef > 0,
        "bias_update_rate": moe.bias_update_rate > 0,
    }
    if spec.moe_layers:
        return
    for key in (key for key, on in asked.items() if on):
        about = f"trainer.moe.{key}"
        yield about, f"{about}={getattr(moe, key)} needs MoE layers, and {spec.path} has none; leave it at its default"


@rule("routing.selection_bias", about="trainer.moe.bias_update_rate")
def has_biases(trainer: Trainer, spec: ModelSpec) -> Iterator[str]:
    rate = trainer.moe.bias_update_rate
    if rate and spec.moe_layers and not spec.transformer.get("moe_router_enable_expert_bias"):
        yield (
            f"trainer.moe.bias_update_rate={rate} needs a router with selection biases (e_score_correction_bias), and "
            f"the routers of {spec.path} have none; set it to 0"
        )


def route_shape(spec: ModelSpec) -> RouteShape:
    """The shape of this model's routes; one without MoE layers has none."""
    fields = spec.transformer
    return RouteShape(
        layers=fields["num_layers"],
        moe_layers=spec.moe_layers,
        experts=spec.experts or 0,
        topk=fields.get("moe_router_topk") or 0,
    )
