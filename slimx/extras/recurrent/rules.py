"""Configuration rules for recurrent layers: parallel sizes by which the layers' heads can be split, and what trainers
and engines do not support."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.engines import ServedEngines

if TYPE_CHECKING:
    from slimx.layout.ranks import Sizes
    from slimx.models.families import ModelSpec


def _has_delta_nets(spec: ModelSpec) -> bool:
    return any(spec.transformer.get("linear_attention_freq") or ())


@rule("layout.delta_net", "trainer.tensor")
def shares_key_heads(sizes: Sizes, spec: ModelSpec) -> Problems:
    if not _has_delta_nets(spec):
        return
    heads = spec.transformer["linear_num_key_heads"]
    if heads % sizes.tensor:
        yield (
            f"delta nets of {spec.path} have {heads} key heads, which {sizes.tensor} tensor-parallel ranks cannot "
            f"share equally; set trainer.tensor to a divisor of {heads}"
        )
    elif heads // sizes.tensor % sizes.context:
        yield (
            "trainer.context",
            f"with trainer.tensor={sizes.tensor}, a rank has {heads // sizes.tensor} key heads in each delta net of "
            f"{spec.path}, which {sizes.context} context-parallel ranks cannot share equally; set trainer.context to "
            f"a divisor of {heads // sizes.tensor}",
        )


@rule("layout.state_space", "trainer.tensor")
def shares_groups(sizes: Sizes, spec: ModelSpec) -> Problems:
    groups = spec.transformer.get("mamba_num_groups")
    if groups is None or not any(layer.mixer == "recurrent" for layer in spec.layer_kind.layers(spec.transformer)):
        return
    if groups % sizes.tensor:
        yield (
            f"Mamba-2 layers of {spec.path} have {groups} groups, which {sizes.tensor} tensor-parallel ranks cannot "
            f"share equally; set trainer.tensor to a divisor of {groups}"
        )
    if sizes.context > 1:
        yield (
            "trainer.context",
            f"the model {spec.path} has Mamba-2 layers, whose context parallelism in megatron-core 0.19.2 needs "
            "Transformer Engine and was never tested; set trainer.context=1",
        )


@rule("layout.hybrid_values", "model.path")
def has_no_values(algorithm: Algorithm, critic: Critic | None, spec: ModelSpec) -> Problems:
    if spec.transformer.get("is_hybrid_model") and (algorithm.scores or critic is not None):
        yield (
            f"the model {spec.path} is a megatron-core HybridModel, which slimx cannot train as a critic or reward "
            "model; set algorithm.name to an algorithm that trains no critic and no reward model"
        )


@rule("engines.recurrent_state", "rollout.engines.sglang.disable_radix_cache")
def states_are_not_shared(served: ServedEngines, spec: ModelSpec, device: str) -> Problems:
    if device != "cuda" or not _has_delta_nets(spec):
        return
    for group in served.policy:
        if not group.sglang.get("disable_radix_cache"):
            yield (
                f"{group.key}.sglang.disable_radix_cache",
                f"{group.where} serves {spec.path}, but reuse of delta-net states from SGLang's prefix cache was "
                f"never tested; set {group.key}.sglang.disable_radix_cache=true",
            )
