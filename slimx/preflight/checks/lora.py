"""Rules about low-rank adapters that need to know the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slimx.config.rule import Told, rule
from slimx.config.rules.lora import serving
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer
from slimx.layout.adapters import SERVED, absent, adapts
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec

FAMILIES = ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
"""Architectures whose adapters were compared with plain torch's."""
ALONE = ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM")
"""Those with which engines were given adapters beside weights (`publish.adapters`)."""


@rule("lora.family", about="model.path")
def known_family(trainer: Trainer, spec: ModelSpec) -> Iterator[str]:
    if trainer.lora is not None and spec.family.ARCHITECTURE not in FAMILIES:
        yield (
            f"{spec.path} is {spec.family.ARCHITECTURE}, with which trainer.lora was never proven; it was with "
            f"{', '.join(FAMILIES)}"
        )


@rule("lora.targets", about="trainer.lora.targets")
def has_targets(trainer: Trainer, spec: ModelSpec) -> Iterator[Told]:
    if trainer.lora is None:
        return
    for target in absent(trainer.lora.targets or (), spec.table):
        yield f"trainer.lora.targets names {target}, and {spec.path} has no such layers; leave it out"
    if trainer.lora.targets == ():
        yield "trainer.lora.targets is empty, so nothing would train; leave it out, or name layers"


@rule("lora.load", about="trainer.lora.load")
def has_adapters(trainer: Trainer, spec: ModelSpec, adapters: Path | None) -> Iterator[str]:
    if trainer.lora is None or adapters is None:
        return
    from slimx.models.files.peft import PeftAdapters

    PeftAdapters(adapters).check(spec.table, trainer.lora)
    yield from ()


@rule("lora.alone_model", about="publish.adapters")
def served_beside_weights(trainer: Trainer, publish: Publish, spec: ModelSpec) -> Iterator[Told]:
    if trainer.lora is None or publish.adapters != "alone":
        return
    if spec.family.ARCHITECTURE not in ALONE:
        yield (
            f"{spec.path} is {spec.family.ARCHITECTURE}, whose adapters were never published alone; those of "
            f"{', '.join(ALONE)} were: leave publish.adapters at merged"
        )
    names = [row.name for row in spec.table.rows if adapts(trainer.lora.targets, row.name)]
    if any(adapts(("experts",), name) for name in names):
        yield (
            "trainer.lora.targets",
            "trainer.lora.targets has adapters of routed experts, which SGLang 0.5.23 computes with Triton, on GPUs "
            "alone, and engines were never given any unmerged: name attention, or leave publish.adapters at merged",
        )
    elif beside := [name for name in names if not adapts(SERVED, name)]:
        yield (
            "trainer.lora.targets",
            f"trainer.lora.targets has adapters beside {beside[0]}, and engines were given unmerged ones of "
            f"{' and '.join(SERVED)} only: name these, or leave publish.adapters at merged",
        )


@rule("lora.alone_transport", about="publish.transport")
def brings_adapters(publish: Publish) -> Iterator[str]:
    if publish.adapters == "alone" and publish.transport != "memory":
        yield (
            f"publish.transport is {publish.transport}, and adapters were published alone by memory only, on one "
            "machine; set it so, or leave publish.adapters at merged"
        )


@rule("lora.one_kind", about="trainer.lora.targets")
def both_kinds(trainer: Trainer, sizes: Sizes) -> Iterator[str]:
    # One of the two optimizers that megatron-core then has would hold nothing, and 0.19.2 cannot save that.
    if trainer.lora is None or sizes.expert == 1 or not trainer.lora.targets:
        return
    if "experts" not in trainer.lora.targets or set(trainer.lora.targets) == {"experts"}:
        yield (
            f"trainer.expert={sizes.expert} and trainer.lora.targets=[{', '.join(trainer.lora.targets)}]: with expert "
            "parallelism there must be adapters both of experts and of other layers; name both, or set trainer.expert=1"
        )


@rule("lora.served_on_cpu", about="rollout.engines.sglang")
def has_a_gpu(rollout: Rollout, device: str) -> Iterator[Told]:
    """Refuse what SGLang 0.5.23 ends at: its layers with adapters pin memory (`srt/lora/layers.py`), which torch does
    with a GPU only."""
    for key, group in serving(rollout.frozen_engines if device == "cpu" else ()):
        yield (
            key,
            f"{key} of engine {group}: SGLang 0.5.23 serves adapters on GPUs only; merge them into the model that the "
            "group serves, or leave it out",
        )
