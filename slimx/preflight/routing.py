"""Whether a model has what `trainer.moe` asks for."""

from __future__ import annotations

from slimx.config.schema import Config
from slimx.data.routes import RouteShape
from slimx.errors import SlimxError
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


def check_routing(config: Config, spec: ModelSpec) -> None:
    """Raises SlimxError for a setting of `trainer.moe` that this model has no router or no selection bias for."""
    moe = config.trainer.moe
    asked = {
        "replay": moe.replay != "none",
        "aux_loss_coef": moe.aux_loss_coef > 0,
        "z_loss_coef": moe.z_loss_coef > 0,
        "bias_update_rate": moe.bias_update_rate > 0,
    }
    for key in (key for key, on in asked.items() if on):
        if not spec.moe_layers:
            raise SlimxError(
                f"trainer.moe.{key}={getattr(moe, key)} needs MoE layers, and {spec.path} has none; leave it at its "
                "default"
            )
    if moe.bias_update_rate and not spec.transformer.get("moe_router_enable_expert_bias"):
        raise SlimxError(
            f"trainer.moe.bias_update_rate={moe.bias_update_rate} needs a router with selection biases "
            f"(e_score_correction_bias), and the routers of {spec.path} have none; set it to 0"
        )
