"""Combinations of features that have never been tested together, as a table: each feature with the keys that have never
been tested or compared with it. docs/support.md shows the same table (`python -m tools.docs.make_unproven`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from slimx import entry_points
from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer
from slimx.models.layer_kind import GROUP

if TYPE_CHECKING:
    from slimx.models.families import ModelSpec

Sections = Mapping[str, Any]
"""Sections of a configuration by name, typed Any because their classes differ."""


UNPROVEN: Mapping[str, Sequence[str]] = {
    "trainer.optimizer.kind=muon": ("trainer.lora", "trainer.optimizer.offload_fraction"),
    "trainer.optimizer.moments_dtype=bfloat16": (
        "trainer.distributed_optimizer",
        "trainer.optimizer.kind",
        "trainer.optimizer.offload_fraction",
        "trainer.lora",
    ),
    "trainer.grad_reduce_in_fp32=false": ("trainer.optimizer.kind", "numerics.mode"),
    "trainer.overlap_param_gather": (
        "trainer.overlap_grad_reduce=false",  # the overlap needs the buckets of this key
        "trainer.qat",  # rounds weights right after an update
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
    "policies (with separate weights)": (
        "run.fork",
        "numerics.mode",
        "trainer.lora (if a policy does not use the actor's engines)",
        "rollout.engines (without a group for the policy)",
        "rollout.engines.urls",
        "rollout.replay",
        "algorithm.advantages (computed over a whole step, or remax)",
        "algorithm.loss=sft",
        "algorithm.teacher (in trainers or engines)",
        "algorithm.reference_refresh",
        "critic",
        "schedule.max_staleness",
        "schedule.colocate",
        "publish.transport (any except memory)",
        "publish.quantize",
    ),
}
"""Features, each with the entries that have never been tested together with it. An entry is `KEY` (the key's value
differs from the default), `KEY=VALUE` (it has this value), or `KEY (words)` (a condition of `CONDITIONS`). A key of
`rollout.engines` applies to every engine group of the policy."""


CONDITIONS: Mapping[str, Callable[[Sections], bool]] = {
    "rollout.engines.sglang.speculative_algorithm (with multi-token prediction layers)": lambda sections: any(
        group.drafts for group in sections["served"].policy
    ),
    "policies (with separate weights)": lambda sections: any(
        policy.shares is None for policy in sections["policies"].values()
    ),
    "trainer.lora (if a policy does not use the actor's engines)": lambda sections: (
        sections["trainer"].lora is not None
        and any(policy.shares is None and policy.engines_of is None for policy in sections["policies"].values())
    ),
    "rollout.engines (without a group for the policy)": lambda sections: not sections["rollout"].sampled,
    "algorithm.advantages (computed over a whole step, or remax)": lambda sections: (
        sections["algorithm"].needs_whole_step or sections["algorithm"].advantages.kind == "remax"
    ),
    "algorithm.teacher (in trainers or engines)": lambda sections: sections["algorithm"].taught,
    "publish.transport (any except memory)": lambda sections: sections["publish"].transport not in ("auto", "memory"),
}
SINKS: Mapping[str, Sequence[str]] = {"attention sinks": ("trainer.offload_activations",)}
"""Keys that have never been tested together with attention sinks, in the form that `layer_tables` returns."""


def layer_tables() -> dict[str, Sequence[str]]:
    """Returns the keys that have never been tested together with a kind of decoder layer or attention, by the kind's
    name."""
    merged: dict[str, Sequence[str]] = {}
    for kind in entry_points.load_all(GROUP).values():
        merged |= kind.unproven
    return {**merged, **SINKS}


def key_of(entry: str) -> str:
    """Returns the dotted key in `entry`, an entry of a table such as `UNPROVEN`, without the value or condition."""
    return re.split(r"[^\w.]", entry, maxsplit=1)[0]


def is_set(entry: str, sections: Sections) -> bool:
    """Returns True if the configuration uses the feature that `entry` describes. `sections`: its sections by name."""
    if entry in CONDITIONS:
        return CONDITIONS[entry](sections)
    key, _, required = entry.partition("=")
    values = _values(key, sections)
    if required:
        return any(str(value).lower() == required for value, _ in values)
    return any(value != default for value, default in values)


def _values(key: str, sections: Sections) -> list[tuple[object, object]]:
    """Returns the values at `key`, each with its default: one value per engine group for keys of `rollout.engines`,
    otherwise one value; [] if a section that contains the key is null."""
    section, *names = key.split(".")
    values: list[tuple[object, object]] = [(sections[section], None)]
    for name in names:
        if name == "engines":
            values = [(group, None) for group in sections["served"].policy]
        else:
            values = [_inner(owner, name) for owner, _ in values if owner is not None]
    return values


def _inner(owner: object, name: str) -> tuple[object, object]:
    """Returns the value and the default of the field or key `name` in `owner`, a section or a mapping."""
    if isinstance(owner, BaseModel):
        return getattr(owner, name), type(owner).model_fields[name].get_default(call_default_factory=True)
    value = owner.get(name) if isinstance(owner, Mapping) else None
    return value or None, None


def sections_in(table: Mapping[str, Sequence[str]]) -> set[str]:
    """Returns the names of all sections whose keys occur in `table`, a table such as `UNPROVEN`, and `served`."""
    return {"served", *(key_of(entry).partition(".")[0] for entry in chain(table, *table.values()))}


def table_problems(table: Mapping[str, Sequence[str]], sections: Sections) -> Problems:
    """Yields an error for every combination of features in `table` that the configuration uses. `table`: `UNPROVEN`, or
    a table of the same form that an extra defines."""
    for feature, entries in table.items():
        if is_set(feature, sections):
            yield from _refusals(entries, sections, feature)


@rule("unproven", "run", facts=sections_in(UNPROVEN))
def unproven(**sections: object) -> Problems:
    yield from table_problems(UNPROVEN, sections)


def other_architectures(table: Mapping[str, Sequence[str]], sections: Sections, spec: ModelSpec) -> Problems:
    """Yields an error for every feature in `table` that the configuration uses with an architecture with which it has
    never been tested. `table`: features of an extra, each mapped to the architectures with which it has been tested."""
    name = spec.family.ARCHITECTURE
    for feature, architectures in table.items():
        if name not in architectures and is_set(feature, sections):
            yield (
                f"{feature} was never tested with the architecture {name} of {spec.path}; remove this setting, or "
                f"train a model of one of the architectures {', '.join(architectures)}"
            )


@rule("unproven.layers", "model.path")
def unproven_layers(trainer: Trainer, rollout: Rollout, served: ServedEngines, spec: ModelSpec) -> Problems:
    kinds = dict(spec.layer_kind.unproven)
    if spec.transformer.get("softmax_type") == "learnable":
        kinds |= SINKS
    for kind, entries in kinds.items():
        yield from _refusals(
            entries, {"trainer": trainer, "rollout": rollout, "served": served}, f"layers of {spec.path} ({kind})"
        )


def _refusals(entries: Sequence[str], sections: Sections, feature: str) -> Iterator[tuple[str, str]]:
    for entry in entries:
        if is_set(entry, sections):
            for group in sections["served"].policy:
                if is_set(entry, {**sections, "served": ServedEngines((group,))}):
                    entry = entry.replace("rollout.engines.", f"{group.key}.")
                    break
            yield key_of(entry), f"{entry} was never tested together with {feature}; set one of the two to its default"
