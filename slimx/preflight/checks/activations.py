"""Rules about activations that are computed again or wait on the host, and need the model or a device."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.trainer import Trainer
from slimx.models.families import ModelSpec
from slimx.models.state_space import PATTERN


@rule("activations.device", about="trainer.offload_activations")
def has_a_device(trainer: Trainer, device: str) -> Iterator[str]:
    if trainer.offload_activations and device != "cuda":
        yield (
            "trainer.offload_activations moves activations from a GPU to the host, and the run is on the CPU "
            "(cluster.device); leave it out"
        )


@rule("activations.model", about="trainer.offload_activations")
def has_such_modules(trainer: Trainer, spec: ModelSpec) -> Iterator[Told]:
    """Every module that is named is one of the model's."""
    model, recompute = spec.transformer, trainer.recompute
    experts, latent = spec.experts > 0, bool(model.get("multi_latent_attention"))
    shared = bool(model.get("moe_shared_expert_intermediate_size"))
    for key, named, has in (
        ("trainer.offload_activations", trainer.offload_activations, {"expert_fc1": experts, "moe_act": experts}),
        (
            "trainer.recompute.modules",
            recompute.modules if recompute.granularity == "selective" else (),
            {"mla_up_proj": latent, "moe": experts, "moe_act": experts, "shared_experts": shared},
        ),
    ):
        for name in named:
            if not has.get(name, True):
                yield key, f"{key} has {name}, which {spec.path} has none of; take it out"


@rule("activations.attention", about="trainer.offload_activations")
def proven_attention(trainer: Trainer, spec: ModelSpec) -> Iterator[str]:
    mixers = "mamba" if spec.transformer.get(PATTERN) else None
    sinks = "attention sinks" if spec.transformer.get("softmax_type") == "learnable" else None
    kind = spec.transformer.get("experimental_attention_variant") or mixers or sinks
    if kind is not None and trainer.offload_activations:
        yield (
            f"trainer.offload_activations was never proven with the attention of {spec.path} ({kind}); leave it out, "
            "and set trainer.recompute"
        )
