"""Rules about INT4, in training and in publications, that need the configuration alone."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
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
        ("publish.quantise", publish.in_fp8),
        ("algorithm.teacher", algorithm.teacher is not None),
        ("critic", critic is not None),
    ):
        if given:
            yield key, f"{key} was never proven with trainer.qat; leave out one of the two"


@rule("publish.int4", about="publish.quantise")
def takes_codes(publish: Publish, numerics: Numerics, rollout: Rollout) -> Iterator[Told]:
    """Engines hold codes row by row, as checkpoints do, with one of SGLang's kernels alone."""
    if publish.quantise != "int4":
        return
    given = "publish.quantise=int4"
    if numerics.dtype != "bfloat16":
        yield "numerics.dtype", f"{given} has bf16 scales, and numerics.dtype is {numerics.dtype}; set it to bfloat16"
    if publish.encoding == "hf":
        yield "publish.encoding", f"{given} writes codes where engines hold them; set publish.encoding=local or auto"
    for group in rollout.policy_engines:
        backend, where = group.sglang.get("moe_runner_backend", "auto"), "rollout.engines.sglang.{}".format
        if backend != "triton":
            yield (
                where("moe_runner_backend"),
                f"{given}: with sglang.moe_runner_backend={backend} {group.where} may rearrange codes for its kernels, "
                "so that none could be written or proven; set it to triton",
            )
        if group.sglang.get("enforce_shared_experts_fusion"):
            yield (
                where("enforce_shared_experts_fusion"),
                f"{given} rounds routed experts alone, and {group.where} would hold the shared one among them; leave "
                "sglang.enforce_shared_experts_fusion out",
            )
        if group.drafts:
            yield (
                where("speculative_algorithm"),
                f"{given} was never tried with drafts, and {group.where} has a speculative_algorithm; leave one out",
            )
        if group.model is None and not group.urls:
            yield (
                "rollout.engines.model",
                f"{given}, and {group.where} serves model.path itself: set its model to the directory that `slimx "
                "convert hf-to-int4` makes of it",
            )
