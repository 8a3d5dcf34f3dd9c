"""Configuration rules for low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import Engines, ServedEngines
from slimx.config.sections.policies import ACTOR
from slimx.config.sections.publish import Publish
from slimx.config.sections.trainer import Trainer
from slimx.rules.unproven import other_architectures, sections_in, table_problems

if TYPE_CHECKING:
    from pathlib import Path

    from slimx.config.schema import Config
    from slimx.layout.ranks import Sizes
    from slimx.models.families import ModelSpec


UNPROVEN = {
    "trainer.lora": (
        "trainer.virtual_pipeline",
        "trainer.moe.bias_update_rate",
        "trainer.optimizer.offload_fraction",
        "trainer.distributed_optimizer",
        "trainer.megatron.mtp_num_layers",
        "publish.quantize",
        "algorithm.reference_refresh",
        "algorithm.teacher",
        "critic",
    ),
    "publish.adapters=alone": (
        "numerics.mode",
        "publish.encoding=local",
        "schedule.colocate",
        "rollout.engines.role",
        "rollout.engines.model",
        "rollout.engines.urls",
        "rollout.engines.tensor",
        "rollout.engines.pipeline",
        "rollout.engines.sglang.speculative_algorithm",
        "rollout.engines.sglang.quantization",
        "rollout.engines.sglang.torchao_config",
    ),
}
"""Setting -> keys that have not been tested together with this setting (`slimx.rules.unproven.UNPROVEN`)."""
ARCHITECTURES = {
    "trainer.lora": (
        "Qwen2ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
    ),
    "publish.adapters=alone": ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM"),
}
"""Setting -> the only model architectures with which the setting has been tested
(`slimx.rules.unproven.other_architectures`)."""


@rule("unproven", "trainer.lora", facts=sections_in(UNPROVEN))
def unproven(**sections: Any) -> Problems:
    yield from table_problems(UNPROVEN, sections)


@rule("unproven.architecture", "model.path")
def unproven_architecture(trainer: Trainer, publish: Publish, spec: ModelSpec) -> Problems:
    yield from other_architectures(ARCHITECTURES, {"trainer": trainer, "publish": publish}, spec)


@rule("policies.engines_of", "policies")
def shares_a_base(configs: Mapping[str, Config]) -> Problems:
    """Checks that policies served by the actor's engines have the same base weights as the actor, and adapters of the
    same shape."""
    actor = configs[ACTOR]
    adapters = actor.trainer.lora
    for name in actor.served_by_actor:
        if adapters is None or not actor.serves_adapters:
            yield (
                "trainer.lora" if adapters is None else "publish.adapters",
                f"policies.{name}.engines_of makes the actor's engines generate for policy {name}, but they have only "
                "one set of weights; train adapters (trainer.lora) and publish them alone (publish.adapters=alone), or "
                "remove engines_of",
            )
            continue
        other = configs[name].trainer
        same = {
            "model": configs[name].model == actor.model,
            "trainer.load": other.load == actor.trainer.load,
            "trainer.lora": other.lora is not None,
            "trainer.lora.rank": other.lora is None or other.lora.rank == adapters.rank,
            "trainer.lora.targets": other.lora is None or other.lora.targets == adapters.targets,
        }
        for key, equal in same.items():
            if not equal:
                yield (
                    f"policies.{name}.{key}",
                    f"policies.{name}.{key} differs from the actor's, but the actor's engines, which generate for "
                    f"both (engines_of), have one base and adapters of one shape; set {key} to the actor's value, or "
                    "give the policy separate engines",
                )


def _serving(groups: Iterable[Engines]) -> Iterator[tuple[str, str]]:
    """Yields (configuration key, name of the engine group) for each key that makes SGLang serve LoRA adapters that
    slimx does not publish."""
    for group in groups:
        for name in ("enable_lora", "lora_paths"):
            if group.sglang.get(name):
                yield f"{group.key}.sglang.{name}", group.name


@rule("lora.frozen", "trainer.freeze")
def freezes_itself(trainer: Trainer) -> Problems:
    if trainer.lora is not None and trainer.freeze:
        yield (
            "trainer.freeze is set, but trainer.lora already freezes all weights except those of adapters; remove "
            "trainer.freeze, and list the layers that get adapters in trainer.lora.targets"
        )


@rule("lora.targets", "trainer.lora.targets")
def has_targets(trainer: Trainer, spec: ModelSpec) -> Problems:
    if trainer.lora is None:
        return
    from slimx.extras.lora.targets import absent

    for target in absent(trainer.lora.targets or (), spec.table):
        yield (
            f"trainer.lora.targets contains {target}, but {spec.path} has no such layers; remove {target} from "
            "trainer.lora.targets"
        )
    if trainer.lora.targets == ():
        yield (
            "trainer.lora.targets is an empty list, so nothing would be trained; remove trainer.lora.targets to adapt "
            "all layers, or list at least one target, such as attention"
        )


@rule("lora.load", "trainer.lora.load")
def has_adapters(trainer: Trainer, spec: ModelSpec, adapters: Path | None) -> Problems:
    if trainer.lora is not None and adapters is not None:
        from slimx.extras.lora.peft import PeftAdapters

        PeftAdapters(adapters).check(spec.table, trainer.lora)
    yield from ()


@rule("lora.one_kind", "trainer.lora.targets")
def both_kinds(trainer: Trainer, sizes: Sizes) -> Problems:
    # Otherwise one of megatron-core's two optimizers would be empty, which 0.19.2 cannot save.
    if trainer.lora is None or sizes.expert == 1 or not trainer.lora.targets:
        return
    if "experts" not in trainer.lora.targets or set(trainer.lora.targets) == {"experts"}:
        yield (
            f"with trainer.expert={sizes.expert}, both experts and other layers must have adapters, but "
            f"trainer.lora.targets selects {'only' if 'experts' in trainer.lora.targets else 'no'} experts; add "
            f"{'attention' if 'experts' in trainer.lora.targets else 'experts'} to trainer.lora.targets, or set "
            "trainer.expert=1"
        )


@rule("lora.alone", "publish.adapters")
def has_some(trainer: Trainer, publish: Publish) -> Problems:
    if publish.adapters == "alone" and trainer.lora is None:
        yield (
            "publish.adapters=alone publishes only adapters, but trainer.lora is not set, so the run trains no "
            "adapters; set trainer.lora, or remove publish.adapters"
        )


@rule("lora.alone_model", "trainer.lora.targets")
def served_unmerged(trainer: Trainer, publish: Publish, spec: ModelSpec) -> Problems:
    if trainer.lora is None or publish.adapters != "alone":
        return
    from slimx.extras.lora.targets import SERVED, adapts

    names = [row.name for row in spec.table.rows if adapts(trainer.lora.targets, row.name)]
    if any(adapts(("experts",), name) for name in names):
        yield (
            "publish.adapters=alone is not supported for adapters of routed experts, because SGLang 0.5.23 applies "
            "such adapters only with Triton on GPUs, where slimx has not been tested; set "
            "trainer.lora.targets=[attention] or publish.adapters=merged"
        )
        return
    others = [name for name in names if not adapts(SERVED, name)]
    if others:
        yield (
            f"publish.adapters=alone has been tested only with adapters of {' and '.join(SERVED)}, but {others[0]} "
            f"would also have an adapter; list only {' and '.join(SERVED)} in trainer.lora.targets, or set "
            "publish.adapters=merged"
        )


@rule("lora.alone_transport", "publish.transport")
def brings_adapters(publish: Publish, device: str) -> Problems:
    """Checks that the weight transport, which slimx may have chosen for `device`, can publish adapters alone."""
    if publish.adapters == "alone" and publish.transport != "memory":
        yield (
            "publish.adapters=alone requires publish.transport=memory, which works only on one machine, but the "
            f"transport is {publish.transport}; set publish.transport=memory or publish.adapters=merged"
        )


@rule("lora.served", "rollout.engines.sglang")
def serves_merged_weights(served: ServedEngines) -> Problems:
    for key, group in _serving(served.policy):
        yield (
            key,
            f"{key} would make engine {group} add adapters to its layers, but slimx publishes merged weights "
            "(trainer.lora); remove the argument",
        )


@rule("lora.served_on_cpu", "rollout.engines.sglang")
def has_a_gpu(served: ServedEngines, device: str) -> Problems:
    """Refuses arguments that make SGLang serve LoRA adapters on the CPU: SGLang 0.5.23 would crash, because its layers
    with adapters pin memory (`srt/lora/layers.py`), which torch supports only with a GPU."""
    if device != "cpu":
        return
    for key, group in _serving(served.frozen):
        yield (
            key,
            f"engine {group} would serve adapters, which SGLang 0.5.23 supports only on GPUs; merge the adapters into "
            f"the group's model, or remove {key}",
        )
