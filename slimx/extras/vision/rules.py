"""Configuration rules of `trainer.vision`: sections and layouts with which images were never tested."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.publish import Publish
from slimx.config.sections.trainer import Trainer

if TYPE_CHECKING:
    from slimx.layout.ranks import Sizes
    from slimx.models.families import ModelSpec


@rule("vision.algorithm", "algorithm.name")
def trains_policies_only(trainer: Trainer, algorithm: Algorithm, critic: Critic | None) -> Problems:
    if trainer.vision is None:
        return
    if critic is not None:
        yield "critic", "critic is set, but critics do not receive images (trainer.vision); remove critic"
    if algorithm.scores or algorithm.advantages.kind == "dpo":
        yield (
            f"algorithm.name is {algorithm.name}, which was never tested with images; remove trainer.vision, or set "
            "algorithm.name to sft or to an algorithm with rollouts"
        )
    if algorithm.served_teachers:
        yield (
            "algorithm.teacher_engine",
            "served teachers do not receive images (trainer.vision); remove algorithm.teacher_engine, or use "
            "algorithm.teacher",
        )


@rule("vision.precision", "trainer.fp8")
def unquantized_in_trainers(trainer: Trainer, publish: Publish) -> Problems:
    if trainer.vision is None:
        return
    values: dict[str, str | None] = {"trainer.fp8": trainer.fp8, "trainer.qat": trainer.qat}
    if publish.quantize == "int4":
        values["publish.quantize"] = publish.quantize
    for key, value in values.items():
        if value is not None:
            yield key, f"{key}={value} was never tested with images (trainer.vision); remove {key}"


@rule("vision.lora", "trainer.vision.train")
def adapts_text_only(trainer: Trainer) -> Problems:
    if trainer.vision is not None and trainer.lora is not None and trainer.vision.train != "none":
        yield (
            f"trainer.vision.train is {trainer.vision.train}, but trainer.lora freezes all weights and has no adapters "
            "for vision towers; set trainer.vision.train=none"
        )


@rule("vision.engines", "rollout.engines")
def serves_images(trainer: Trainer, served: ServedEngines) -> Problems:
    if trainer.vision is None:
        return
    for group in served.policy:
        if group.role != "regular":
            yield (
                f"{group.key}.role",
                f"{group.where} has the role {group.role}, which was never tested with images (trainer.vision); set "
                f"{group.key}.role=regular",
            )
        for key in ("mm_enable_dp_encoder", "enable_broadcast_mm_inputs_process", "language_only", "encoder_only"):
            if group.sglang.get(key):
                yield (
                    f"{group.key}.sglang.{key}",
                    f"{group.where} sets {key}, with which images (trainer.vision) were never tested; remove "
                    f"{group.key}.sglang.{key}",
                )


@rule("layout.deepstack", "trainer.pipeline")
def first_stage_has_features(trainer: Trainer, sizes: Sizes, spec: ModelSpec) -> Problems:
    if trainer.vision is None:
        return
    from slimx.extras.vision.layer_kinds import WithTower  # imports the families of models

    kind = spec.layer_kind
    if not isinstance(kind, WithTower) or kind.inputs is None:
        return
    levels = kind.inputs.tower.levels
    first = sizes.split[0] if sizes.split else spec.table.layers // sizes.stages
    if first < levels:
        yield (
            f"the first of {sizes.stages} pipeline stages has {first} decoder layers, but the vision tower of "
            f"{spec.path} adds features to the first {levels}; lower trainer.pipeline or trainer.virtual_pipeline, or "
            "set trainer.layers_per_stage"
        )
