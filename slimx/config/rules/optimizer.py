"""Rules about the kind of optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.trainer import Muon, Trainer


@rule("muon.unused", about="trainer.optimizer.muon")
def used(trainer: Trainer) -> Iterator[str]:
    if trainer.optimizer.kind == "adam" and trainer.optimizer.muon != Muon():
        yield (
            "trainer.optimizer.muon is set, but trainer.optimizer.kind is adam; set trainer.optimizer.kind=muon, or "
            "leave trainer.optimizer.muon out"
        )


@rule("muon.distributed", about="trainer.distributed_optimizer")
def whole_matrices(trainer: Trainer) -> Iterator[str]:
    if trainer.optimizer.kind == "muon" and trainer.distributed_optimizer:
        yield (
            "trainer.distributed_optimizer cuts matrices into shards, which Muon cannot orthogonalise; set "
            "trainer.distributed_optimizer=false"
        )


@rule("muon.proven", about="trainer.optimizer.kind")
def proven(trainer: Trainer, algorithm: Algorithm, critic: Critic | None) -> Iterator[Told]:
    if critic is not None and critic.optimizer.kind == "muon":
        yield "critic.optimizer.kind", "critic.optimizer.kind=muon was never proven for a value head; set it to adam"
    if trainer.optimizer.kind != "muon":
        return
    for key, given in (
        ("trainer.lora", trainer.lora is not None),
        ("trainer.optimizer.offload_fraction", trainer.optimizer.offload_fraction > 0),
        ("algorithm.name", algorithm.scores),
    ):
        if given:
            yield key, f"{key} was never proven with trainer.optimizer.kind=muon; change it, or set the kind to adam"


@rule("moments.proven", about="trainer.optimizer.moments_dtype")
def short_moments(trainer: Trainer, critic: Critic | None) -> Iterator[Told]:
    halves = "bfloat16"
    if critic is not None and critic.optimizer.moments_dtype == halves:
        key = "critic.optimizer.moments_dtype"
        yield key, f"{key}={halves} was never proven for a value head; set it to float32"
    if trainer.optimizer.moments_dtype != halves:
        return
    for key, given in (
        ("trainer.distributed_optimizer", not trainer.distributed_optimizer),
        ("trainer.optimizer.kind", trainer.optimizer.kind != "adam"),
        ("trainer.optimizer.offload_fraction", trainer.optimizer.offload_fraction > 0),
        ("trainer.lora", trainer.lora is not None),
    ):
        if given:
            yield (
                key,
                f"{key} excludes trainer.optimizer.moments_dtype={halves}, which megatron-core has for its distributed "
                "Adam on the GPU and slimx proved for all weights; leave out one of the two",
            )
