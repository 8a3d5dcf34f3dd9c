"""Combinations that were never proven: one table of features, and for every one the keys that were never tried or
compared with it. docs/support.md has the same table (`python -m tools.docs.make_unproven`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from slimx.config.rule import Problems, rule
from slimx.config.section import Section
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer

if TYPE_CHECKING:
    from slimx.models.families import ModelSpec

Sections = Mapping[str, Any]
"""Sections of a configuration by name."""


UNPROVEN: Mapping[str, Sequence[str]] = {
    "trainer.fp8": (
        "numerics.mode",
        "trainer.lora",
        "trainer.qat",
        "trainer.optimizer.kind",
        "trainer.optimizer.offload_fraction",
        "trainer.optimizer.moments_dtype",
        "trainer.grad_reduce_in_fp32",
        "trainer.overlap_param_gather",
        "trainer.freeze",
        "trainer.moe.dispatcher",
        "trainer.megatron.mtp_num_layers",
        "algorithm.teacher",
        "algorithm.loss=bradley_terry",
        "critic",
    ),
    "trainer.qat": (
        "trainer.lora",
        "publish.quantise (rules of fp8)",
        "algorithm.teacher",
        "critic",
    ),
    "publish.quantise=int4": ("rollout.engines.sglang.speculative_algorithm (layers of multi-token prediction)",),
    "trainer.optimizer.kind=muon": (
        "trainer.lora",
        "trainer.optimizer.offload_fraction",
        "algorithm.loss=bradley_terry",
    ),
    "trainer.optimizer.moments_dtype=bfloat16": (
        "trainer.distributed_optimizer",
        "trainer.optimizer.kind",
        "trainer.optimizer.offload_fraction",
        "trainer.lora",
    ),
    "trainer.grad_reduce_in_fp32=false": ("trainer.optimizer.kind", "numerics.mode"),
    "trainer.overlap_param_gather": (
        "trainer.overlap_grad_reduce=false",  # without its buckets nothing overlaps
        "trainer.qat",  # rounds the weights as soon as they are updated
        "trainer.lora",
        "numerics.mode",
    ),
    "trainer.offload_activations": (
        "trainer.lora",
        "trainer.freeze",
        "trainer.qat",
        "trainer.fp8",
        "trainer.virtual_pipeline",
        "trainer.optimizer.kind",
        "trainer.moe.dispatcher",
        "trainer.megatron.mtp_num_layers",
        "numerics.mode",
        "critic",
    ),
    "critic": ("critic.optimizer.kind", "critic.optimizer.moments_dtype"),
    "algorithm.loss=bradley_terry": (
        "trainer.lora",
        "trainer.freeze",
        "trainer.indexer_replay",
        "trainer.moe.routing_replay",
        "trainer.moe.aux_loss_coef",
        "trainer.moe.z_loss_coef",
        "trainer.moe.bias_update_rate",
        "trainer.megatron.mtp_num_layers",
        "numerics.mode",
        "publish.quantise",
        "schedule.colocate",
    ),
    "policies (with further weights)": (
        "run.fork",
        "numerics.mode",
        "trainer.lora (where a policy has other engines than the actor)",
        "rollout.engines (none that samples)",
        "rollout.engines.urls",
        "rollout.replay",
        "algorithm.advantages (that need the whole step, and remax)",
        "algorithm.loss=sft",
        "algorithm.loss=bradley_terry",
        "algorithm.teacher (in trainers or engines)",
        "algorithm.reference_refresh",
        "critic",
        "schedule.max_staleness",
        "schedule.colocate",
        "publish.transport (all but memory)",
        "publish.quantise",
    ),
}
"""Feature -> what was never proven with it. `KEY`: it differs from its default; `KEY=VALUE`: it has this value; `KEY
(words)`: a condition of `CONDITIONS`. A key of `rollout.engines` is that of any group of the policy."""
CONDITIONS: Mapping[str, Callable[[Sections], bool]] = {
    "publish.quantise (rules of fp8)": lambda sections: sections["publish"].in_fp8,
    "rollout.engines.sglang.speculative_algorithm (layers of multi-token prediction)": lambda sections: any(
        group.drafts for group in sections["rollout"].policy_engines
    ),
    "policies (with further weights)": lambda sections: any(
        policy.shares is None for policy in sections["policies"].values()
    ),
    "trainer.lora (where a policy has other engines than the actor)": lambda sections: (
        sections["trainer"].lora is not None
        and any(policy.shares is None and policy.engines_of is None for policy in sections["policies"].values())
    ),
    "rollout.engines (none that samples)": lambda sections: not sections["rollout"].sampled,
    "algorithm.advantages (that need the whole step, and remax)": lambda sections: (
        sections["algorithm"].needs_whole_step or sections["algorithm"].advantages.kind == "remax"
    ),
    "algorithm.teacher (in trainers or engines)": lambda sections: sections["algorithm"].taught,
    "publish.transport (all but memory)": lambda sections: sections["publish"].transport not in ("auto", "memory"),
}
ARCHITECTURES: Mapping[str, Sequence[str]] = {
    "trainer.fp8": ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"),
}
"""Feature -> the architectures with which alone it was proven."""
LAYERS: Mapping[str, Sequence[str]] = {
    "Mamba-2": ("trainer.qat", "trainer.optimizer.kind", "trainer.freeze", "trainer.offload_activations"),
    "delta nets": ("rollout.engines.role", "rollout.engines.sglang.speculative_algorithm"),
    "megatron-core's experimental attention": ("trainer.offload_activations",),
    "attention sinks": ("trainer.offload_activations",),
}
"""Kind of layers of a model -> what was never proven with them."""


def key_of(entry: str) -> str:
    """The key of an entry of the tables."""
    return re.match(r"[\w.]+", entry)[0]


def is_set(entry: str, sections: Sections) -> bool:
    """True if the sections have what `entry` names."""
    if entry in CONDITIONS:
        return CONDITIONS[entry](sections)
    key, _, wanted = entry.partition("=")
    found = _values(key, sections)
    return any(str(value).lower() == wanted if wanted else value != default for value, default in found)


def _values(key: str, sections: Sections) -> list[tuple[Any, Any]]:
    """Values at `key` with their defaults: several of groups of engines, none where the key ends in no section."""
    section, *names = key.split(".")
    found = [(sections[section], None)]
    for name in names:
        if name == "engines":
            found = [(group, None) for group in sections["rollout"].policy_engines]
        else:
            found = [_inner(owner, name) for owner, _ in found if owner is not None]
    return found


def _inner(owner: Any, name: str) -> tuple[Any, Any]:
    if isinstance(owner, Mapping):
        return owner.get(name) or None, None
    return getattr(owner, name), type(owner).model_fields[name].get_default(call_default_factory=True)


def sections_in(table: Mapping[str, Sequence[str]]) -> set[str]:
    """Names of the sections whose keys a table such as `UNPROVEN` names."""
    return {key_of(entry).partition(".")[0] for entry in (*table, *chain.from_iterable(table.values()))}


def found_in(table: Mapping[str, Sequence[str]], sections: Sections) -> Problems:
    """Refusals by a table such as `UNPROVEN`, of an extra's features."""
    for feature, entries in table.items():
        if is_set(feature, sections):
            yield from _refusals(entries, sections, feature)


@rule("unproven", "run", facts=sections_in(UNPROVEN))
def unproven(**sections: Any) -> Problems:
    yield from found_in(UNPROVEN, sections)


def found_with(table: Mapping[str, Sequence[str]], spec: ModelSpec, **sections: Section) -> Problems:
    """Refusals by a table such as `ARCHITECTURES`, of an extra's features."""
    for feature, architectures in table.items():
        name = spec.family.ARCHITECTURE
        if name not in architectures and is_set(feature, sections):
            yield (
                f"{spec.path} is a {name}, with which {feature} was never proven; leave that out, or train one of "
                f"{', '.join(architectures)}"
            )


@rule("unproven.architecture", "model.path")
def unproven_architecture(trainer: Trainer, spec: ModelSpec) -> Problems:
    yield from found_with(ARCHITECTURES, spec, trainer=trainer)


@rule("unproven.layers", "model.path")
def unproven_layers(trainer: Trainer, rollout: Rollout, spec: ModelSpec) -> Problems:
    for kind in _kinds(spec):
        yield from _refusals(LAYERS[kind], {"trainer": trainer, "rollout": rollout}, f"layers of {spec.path} ({kind})")


def _kinds(spec: ModelSpec) -> Iterator[str]:
    """Keys of `LAYERS`."""
    from slimx.models.flops import delta_net_layers
    from slimx.models.state_space import PATTERN

    if spec.transformer.get(PATTERN):
        yield "Mamba-2"
    if delta_net_layers(spec.transformer):
        yield "delta nets"
    if spec.transformer.get("experimental_attention_variant"):
        yield "megatron-core's experimental attention"
    if spec.transformer.get("softmax_type") == "learnable":
        yield "attention sinks"


def _refusals(entries: Sequence[str], sections: Sections, feature: str) -> Iterator[tuple[str, str]]:
    for entry in entries:
        if is_set(entry, sections):
            yield key_of(entry), f"{entry} was never proven with {feature}; leave one of the two at its default"
