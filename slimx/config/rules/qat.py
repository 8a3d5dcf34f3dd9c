"""Rules about quantisation-aware training that need the configuration alone."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.publish import Publish
from slimx.config.sections.run import Numerics
from slimx.config.sections.trainer import Trainer


@rule("qat.dtype", about="numerics.dtype")
def keeps_unrounded_weights(trainer: Trainer, numerics: Numerics) -> Iterator[str]:
    """Only a model in bf16 has fp32 weights of its optimizer beside those that it computes with."""
    if trainer.qat is not None and numerics.dtype != "bfloat16":
        yield (
            f"trainer.qat={trainer.qat} rounds the weights of the model, and with numerics.dtype={numerics.dtype} the "
            "optimizer has no others; set numerics.dtype=bfloat16, or leave trainer.qat out"
        )


@rule("qat.proven", about="trainer.qat")
def proven(trainer: Trainer, publish: Publish, algorithm: Algorithm, critic: Critic | None) -> Iterator[Told]:
    if trainer.qat is None:
        return
    for key, given in (
        ("trainer.lora", trainer.lora is not None),
        ("publish.quantise", publish.quantise is not None),
        ("algorithm.teacher", algorithm.teacher is not None),
        ("critic", critic is not None),
    ):
        if given:
            yield key, f"{key} was never proven with trainer.qat; leave out one of the two"
