"""Combinations that were never proven: one table of features, and for every one the keys that were never tried or
compared with it. docs/support.md has the same table (`python -m tools.docs.make_unproven`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from slimx import entry_points
from slimx.config.rule import Problems, rule
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer
from slimx.models.layer_kind import GROUP

if TYPE_CHECKING:
    from slimx.models.families import ModelSpec

Sections = Mapping[str, Any]
"""Sections of a configuration by name."""


UNPROVEN: Mapping[str, Sequence[str]] = {
    "trainer.optimizer.kind=muon": (
        "trainer.lora",
        "trainer.optimizer.offload_fraction",
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
    "policies (with further weights)": (
        "run.fork",
        "numerics.mode",
        "trainer.lora (where a policy has other engines than the actor)",
        "rollout.engines (none that samples)",
        "rollout.engines.urls",
        "rollout.replay",
        "algorithm.advantages (that need the whole step, and remax)",
        "algorithm.loss=sft",
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
SINKS: Mapping[str, Sequence[str]] = {"attention sinks": ("trainer.offload_activations",)}
"""Kind of attention -> keys that were never proven with it."""


def layer_tables() -> dict[str, Sequence[str]]:
    """Returns keys that were never proven with a kind of layers, by its name, of all kinds."""
    tables = (kind.unproven for kind in entry_points.load_all(GROUP).values())
    return dict(chain.from_iterable(table.items() for table in (*tables, SINKS)))


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


def other_architectures(table: Mapping[str, Sequence[str]], sections: Sections, spec: ModelSpec) -> Problems:
    """Refusals by a table such as `ARCHITECTURES`, of an extra's features."""
    for feature, architectures in table.items():
        name = spec.family.ARCHITECTURE
        if name not in architectures and is_set(feature, sections):
            yield (
                f"{spec.path} is a {name}, with which {feature} was never proven; leave that out, or train one of "
                f"{', '.join(architectures)}"
            )


@rule("unproven.layers", "model.path")
def unproven_layers(trainer: Trainer, rollout: Rollout, spec: ModelSpec) -> Problems:
    kinds = spec.layer_kind.unproven | (SINKS if spec.transformer.get("softmax_type") == "learnable" else {})
    for kind, entries in kinds.items():
        yield from _refusals(entries, {"trainer": trainer, "rollout": rollout}, f"layers of {spec.path} ({kind})")


def _refusals(entries: Sequence[str], sections: Sections, feature: str) -> Iterator[tuple[str, str]]:
    for entry in entries:
        if is_set(entry, sections):
            yield key_of(entry), f"{entry} was never proven with {feature}; leave one of the two at its default"
