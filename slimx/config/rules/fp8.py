"""Rules about training in fp8 that need the configuration alone."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.publish import Publish
from slimx.config.sections.run import Cluster, Numerics
from slimx.config.sections.trainer import Trainer

ON = {"blockwise": ("h100", "h200"), "mxfp8": ("gb300",)}
"""GPUs (`cluster.gpu`) whose tensor cores take the blocks of a recipe as they are. Blackwell computes 128-wide blocks
as MXFP8, for which their scales would have to be powers of two."""


@rule("fp8.dtype", about="numerics.dtype")
def from_bf16(trainer: Trainer, numerics: Numerics) -> Iterator[str]:
    if trainer.fp8 is not None and numerics.dtype != "bfloat16":
        yield (
            f"trainer.fp8={trainer.fp8} rounds bf16 tensors, as publications do, and numerics.dtype is "
            f"{numerics.dtype}; set numerics.dtype=bfloat16"
        )


@rule("fp8.gpu", about="trainer.fp8")
def on_this_gpu(trainer: Trainer, cluster: Cluster) -> Iterator[str]:
    if trainer.fp8 is not None and cluster.gpu not in (None, *ON[trainer.fp8]):
        other = next(name for name, gpus in ON.items() if cluster.gpu in gpus)
        yield f"trainer.fp8={trainer.fp8} is not for cluster.gpu={cluster.gpu}; set trainer.fp8={other}"


@rule("fp8.quantise", about="publish.quantise")
def one_rule(trainer: Trainer, publish: Publish) -> Iterator[str]:
    """Engine and trainer round weights by one rule, or engines get them unrounded."""
    if trainer.fp8 is None or publish.quantise is None or (trainer.fp8, publish.quantise) == ("blockwise", "te"):
        return
    remedy = "set publish.quantise=te" if trainer.fp8 == "blockwise" else "leave publish.quantise out"
    yield (
        f"trainer.fp8={trainer.fp8} rounds weights otherwise than publish.quantise={publish.quantise}, and engines "
        f"would compute with other weights than the trainer; {remedy}"
    )


@rule("fp8.proven", about="trainer.fp8")
def proven(trainer: Trainer, numerics: Numerics, algorithm: Algorithm, critic: Critic | None) -> Iterator[Told]:
    if trainer.fp8 is None:
        return
    for key, given in (
        ("numerics.mode", numerics.exact),
        ("trainer.lora", trainer.lora is not None),
        ("trainer.qat", trainer.qat is not None),
        ("trainer.optimizer.kind", trainer.optimizer.kind != "adam"),
        ("trainer.optimizer.offload_fraction", trainer.optimizer.offload_fraction > 0),
        ("trainer.optimizer.moments_dtype", trainer.optimizer.moments_dtype != "float32"),
        ("trainer.grad_reduce_in_fp32", not trainer.grad_reduce_in_fp32),
        ("trainer.overlap_param_gather", trainer.overlap_param_gather),
        ("trainer.freeze", bool(trainer.freeze)),
        ("trainer.moe.dispatcher", trainer.moe.dispatcher != "alltoall"),
        ("algorithm.teacher", algorithm.teacher is not None),
        ("algorithm.name", algorithm.scores),
        ("critic", critic is not None),
    ):
        if given:
            yield key, f"{key} was never proven with trainer.fp8; leave out one of the two"
