"""Rules about what data-parallel ranks exchange: gradients and updated weights."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.run import Numerics
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer


@rule("param_gather.effect", about="trainer.overlap_param_gather")
def gathered_beside_a_pass(trainer: Trainer, schedule: Schedule, algorithm: Algorithm) -> Iterator[str]:
    if not trainer.overlap_param_gather:
        return
    effect = "trainer.overlap_param_gather has no effect, for"
    if not trainer.distributed_optimizer:
        yield f"{effect} trainer.distributed_optimizer is false and every rank updates all weights; leave it out"
    if schedule.updates_per_step == 1 or algorithm.scores:
        last = "a reward model scores pairs" if algorithm.scores else "schedule.updates_per_step is 1 and a step ends"
        yield f"{effect} {last} after every update, and that needs whole weights; leave it out"


@rule("param_gather.proven", about="trainer.overlap_param_gather")
def whole_when_read(trainer: Trainer, numerics: Numerics) -> Iterator[Told]:
    if not trainer.overlap_param_gather:
        return
    for key, given in (
        ("trainer.overlap_grad_reduce", trainer.overlap_grad_reduce is False),  # without its buckets nothing overlaps
        ("trainer.qat", trainer.qat is not None),  # rounds the weights as soon as they are updated
        ("trainer.lora", trainer.lora is not None),
        ("numerics.mode", numerics.exact),
    ):
        if given:
            yield key, f"{key} excludes trainer.overlap_param_gather; leave out one of the two"


@rule("grad_reduce.proven", about="trainer.grad_reduce_in_fp32")
def reduced_in_bf16(trainer: Trainer, numerics: Numerics) -> Iterator[Told]:
    if trainer.grad_reduce_in_fp32:
        return
    if numerics.dtype == "float32":
        yield (
            "trainer.grad_reduce_in_fp32 is false, but numerics.dtype is float32 and so are the gradients; leave it out"
        )
    for key, given in (
        ("trainer.optimizer.kind", trainer.optimizer.kind != "adam"),
        ("numerics.mode", numerics.exact),
    ):
        if given:
            yield key, f"{key} was never proven with trainer.grad_reduce_in_fp32=false; leave out one of the two"
