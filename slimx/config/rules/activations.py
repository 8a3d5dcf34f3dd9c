"""Rules about activations that are computed again or wait on the host, as far as the configuration tells."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.critic import Critic
from slimx.config.sections.run import Numerics
from slimx.config.sections.trainer import Trainer


@rule("activations.recompute", about="trainer.recompute.granularity")
def moves_or_recomputes(trainer: Trainer) -> Iterator[str]:
    """Activations are either computed again or moved: the two were never proven beside each other."""
    if trainer.offload_activations and trainer.recompute.granularity != "none":
        yield (
            f"trainer.recompute.granularity={trainer.recompute.granularity} was never proven with "
            "trainer.offload_activations; set granularity to none, or leave the other out"
        )


@rule("activations.attn_proj", about="trainer.offload_activations")
def moves_the_output_with_the_attention(trainer: Trainer) -> Iterator[str]:
    if "attn_proj" in trainer.offload_activations and "core_attn" not in trainer.offload_activations:
        yield (
            "trainer.offload_activations has attn_proj without core_attn, which keeps the same tensor on the device: "
            "name both"
        )


@rule("activations.proven", about="trainer.offload_activations")
def proven(trainer: Trainer, numerics: Numerics, critic: Critic | None) -> Iterator[Told]:
    if not trainer.offload_activations:
        return
    for key, given in (
        ("trainer.lora", trainer.lora is not None),
        ("trainer.freeze", bool(trainer.freeze)),
        ("trainer.qat", trainer.qat is not None),
        ("trainer.fp8", trainer.fp8 is not None),
        ("trainer.virtual_pipeline", trainer.virtual_pipeline > 1),
        ("trainer.optimizer.kind", trainer.optimizer.kind != "adam"),
        ("trainer.moe.dispatcher", trainer.moe.dispatcher != "alltoall"),
        ("trainer.megatron.mtp_num_layers", bool(trainer.megatron.get("mtp_num_layers"))),
        ("numerics.mode", numerics.exact),
        ("critic", critic is not None),
    ):
        if given:
            yield key, f"{key} was never proven with trainer.offload_activations; leave out one of the two"
