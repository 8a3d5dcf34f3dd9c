"""Section `policies`: further policies that a run trains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pydantic import Field

from slimx.config.section import Faults, Options, Section
from slimx.config.sections.engines import Engines
from slimx.config.sections.objectives import OBJECTIVES, merged_objective
from slimx.json_types import Json

ACTOR = "actor"
"""Name of the policy that the run's top-level sections describe; every run has it."""
RESERVED = frozenset({ACTOR, "critic", "slimx", "trainer"})
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_OF_POLICY = re.compile(r"policy/([^/]+)/([^/]+/.+)")


def prefix_of(policy: str) -> str:
    """Returns the prefix of a policy's metrics and of the paths of its files and processes: "" for `actor`, else
    "policy/NAME/"."""
    return "" if policy == ACTOR else f"policy/{policy}/"


def policy_of(metric: str) -> tuple[str, str]:
    """Returns the name of the policy to which a metric belongs, "" for `actor`, and the metric's name without the
    policy's prefix."""
    match = _OF_POLICY.fullmatch(metric)
    if match is None:
        return "", metric
    return match[1], match[2]


class Policy(Section):
    """Additional policy with separate weights, trainer ranks and engines. Settings that are not listed here are those
    of the run's top-level sections, which describe the policy `actor`."""

    shares: str | None = None
    """Name of the policy whose weights this role uses: `actor`, or one of `policies`; null: separate weights. If it is
    set, both names refer to one trained policy, and no other key of this role may be set."""
    model: Options = Field(default_factory=dict)
    """Keys of section `model` that differ from the run's, such as {path: DIRECTORY}. With another path, the run's
    trainer.load is not used."""
    trainer: Options = Field(default_factory=dict)
    """Keys of section `trainer` that differ from the run's, nested as in that section: {world_size: 2, optimizer: {lr:
    1.0e-5}}."""
    algorithm: Options = Field(default_factory=dict)
    """Keys of section `algorithm` that differ from the run's. `credit` cannot differ, because it assigns rewards across
    policies."""
    engines: tuple[Engines, ...] | None = None
    """Engine groups of this policy, with names that no other policy uses; null: groups like those of the policy
    `actor`, named after this policy."""
    engines_of: str | None = None
    """Policy whose engines also generate for this policy; only `actor` is possible. The engines have one copy of the
    common base weights and separate adapters, which requires publish.adapters=alone and trainer.lora with equal rank
    and targets. null: this policy has separate engines."""

    def _faults(self) -> Faults:
        changed = []
        for key in ("model", "trainer", "algorithm", "engines", "engines_of"):
            if getattr(self, key) not in (None, {}):
                changed.append(key)
        if self.shares is not None and changed:
            yield (
                "policies.shares",
                f"policies.{changed[0]}",
                f"policies: a role with shares={self.shares} uses the weights of that policy and cannot set "
                f"{changed[0]}; remove `shares` or the other keys",
            )
        if self.engines is not None and self.engines_of is not None:
            yield (
                "policies.engines_of",
                "policies.engines",
                f"policies: engines_of={self.engines_of} uses another policy's engines, but engines is set too; "
                "remove one of the two",
            )
        if "credit" in self.algorithm:
            yield (
                "policies.credit",
                "policies.algorithm.credit",
                "policies: algorithm.credit assigns rewards across all policies; set it in the run's section algorithm "
                "instead",
            )


def name_faults(policies: Mapping[str, Policy]) -> Faults:
    """Yields faults for names that are reserved or cannot be part of metric and file names, and for references to
    policies that do not exist."""
    with_weights = {ACTOR}
    for name, policy in policies.items():
        if policy.shares is None:
            with_weights.add(name)
    for name, policy in policies.items():
        if name in RESERVED or not _NAME.fullmatch(name):
            yield (
                "policies.name",
                name,
                f"policies: {name!r} cannot be the name of a policy; use a name of letters, digits, _ and - that "
                f"starts with a letter and is none of {', '.join(sorted(RESERVED))}",
            )
        if policy.shares is not None and policy.shares not in with_weights:
            yield (
                "policies.shares",
                f"policies.{name}.shares",
                f"policies.{name}.shares is {policy.shares!r}, which is not a policy with separate weights; set one "
                f"of {', '.join(sorted(with_weights))}",
            )
        if policy.engines_of not in (None, ACTOR):
            yield (
                "policies.engines_of",
                f"policies.{name}.engines_of",
                f"policies.{name}.engines_of is {policy.engines_of!r}, but only engines of {ACTOR} can be shared; "
                f"set {ACTOR}",
            )


def engine_faults(engines: Mapping[str, Sequence[Engines]]) -> Faults:
    """Yields a fault for each engine group with a name that another policy already uses, because logs and metrics
    identify groups by name. `engines`: groups by policy name."""
    owners: dict[str, str] = {}
    for policy, groups in engines.items():
        for group in groups:
            if group.borrowed:
                continue
            other = owners.setdefault(group.name, policy)
            if other != policy:
                yield (
                    "policies.engine_name",
                    group.name,
                    f"policies.{policy} and the policy {other} both have an engine group named {group.name}; "
                    "rename one of them",
                )


def merged(base: Mapping[str, object], changes: Mapping[str, object]) -> Json:
    """Returns a copy of `base` with the values of `changes`, which replace or extend those of `base`, including those
    in nested mappings."""
    out = dict(base)
    for key, value in changes.items():
        inner = out.get(key)
        out[key] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return out


def derived(run: Json, name: str, policy: Policy) -> Json:
    """Returns the configuration of the policy `name` as plain values: the run's configuration with the policy's
    overrides applied. `run`: the keys that the run's configuration sets explicitly."""
    model = merged(run["model"], policy.model)
    trainer = dict(run.get("trainer", {}))
    if model["path"] != run["model"]["path"]:
        trainer.pop("load", None)
    # Another algorithm replaces all of the run's settings with its own defaults.
    base = {} if "name" in policy.algorithm else run.get("algorithm", {})
    algorithm = merged(base, policy.algorithm)
    for key in OBJECTIVES.keys() & policy.algorithm.keys():
        algorithm[key] = merged_objective(base.get(key), policy.algorithm[key])
    algorithm.pop("credit", None)  # set once per run, because it covers the trajectories of all policies
    return {
        **run,
        "policies": {},
        "model": model,
        "trainer": merged(trainer, policy.trainer),
        "algorithm": algorithm,
        "rollout": {**run["rollout"], "engines": _engines(run["rollout"], name, policy)},
    }


def _engines(rollout: Json, name: str, policy: Policy) -> Sequence[Engines | Json]:
    if policy.engines is not None:
        return [group.copied(f"policies.{name}.engines") for group in policy.engines]
    groups = []
    for group in rollout.get("engines", ({},)):
        if not group.get("frozen"):
            groups.append(dict(group))
    if policy.engines_of is not None:
        return [Engines(**group).copied("rollout.engines", borrowed=True) for group in groups]
    for group in groups:
        group["name"] = name if len(groups) == 1 else f"{name}-{group.get('name', ACTOR)}"
        if "path" in policy.model:
            group.pop("model", None)  # it is a copy of the model of `actor`
    return groups
