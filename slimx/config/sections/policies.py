"""Section policies: further policies that a run trains beside its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from slimx.config.section import Faults, Section
from slimx.config.sections.engines import Engines
from slimx.config.sections.objectives import OBJECTIVES, merged_objective

ACTOR = "actor"
"""Name of the policy that the run's own sections describe."""
TAKEN = frozenset({ACTOR, "critic", "slimx", "trainer"})
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


def prefix_of(policy: str) -> str:
    """Begin of the names of a policy's metrics, and of its parts' paths: those of the run's own policy have none."""
    return "" if policy == ACTOR else f"policy/{policy}/"


class Policy(Section):
    """One more policy, with weights, trainer ranks and engines of its own. What is not said here is as the run's own
    sections say for the policy `actor`."""

    shares: str | None = None
    """Name of the policy whose weights this role has: both are then one policy (`actor`, or one of `policies`), and
    every other key stays out; null: it has its own."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Keys of section `model` that differ: {path: DIRECTORY}. With another path, trainer.load is not taken over."""
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Keys of section `trainer` that differ, nested as there: {world_size: 2, optimizer: {lr: 1.0e-5}}."""
    algorithm: dict[str, Any] = Field(default_factory=dict)
    """Keys of section `algorithm` that differ; `credit` is the run's."""
    engines: tuple[Engines, ...] | None = None
    """Groups of servers of this policy, with names of their own; null: groups like those of the policy `actor`, named
    after this policy."""
    engines_of: str | None = None
    """`actor`: its engines generate for this policy, too, and hold the base that both have once, with the adapters of
    each beside it (publish.adapters=alone; trainer.lora of equal rank and targets); null: this policy has engines of
    its own."""

    def _faults(self) -> Faults:
        given = [key for key in ("model", "trainer", "algorithm") if getattr(self, key)]
        given += [key for key in ("engines", "engines_of") if getattr(self, key) is not None]
        if self.shares is not None and given:
            yield (
                "policies.shares",
                f"policies.{given[0]}",
                f"policies: a role that shares the weights of {self.shares} has no {given[0]} of its own; leave "
                "shares or the other keys out",
            )
        if self.engines is not None and self.engines_of is not None:
            yield (
                "policies.engines_of",
                "policies.engines",
                f"policies: engines_of={self.engines_of} has another policy's engines generate, and engines names some "
                "of its own; leave one out",
            )
        if "credit" in self.algorithm:
            yield (
                "policies.credit",
                "policies.algorithm.credit",
                "policies: algorithm.credit shares rewards out among all policies, so that none has one of its own; "
                "set the run's",
            )


def name_faults(policies: Mapping[str, Policy]) -> Faults:
    """Yields names that cannot stand in metrics and file names, and roles that share with none."""
    for name, policy in policies.items():
        if name in TAKEN or not _NAME.fullmatch(name):
            yield (
                "policies.name",
                name,
                f"policies: {name!r} is no name for a policy; use letters, digits, _ and -, a letter first, and none "
                f"of {', '.join(sorted(TAKEN))}",
            )
        own = {ACTOR, *(other for other, each in policies.items() if each.shares is None)}
        if policy.shares is not None and policy.shares not in own:
            yield (
                "policies.shares",
                f"policies.{name}.shares",
                f"policies.{name}.shares is {policy.shares!r}, which has no weights of its own; name one of "
                f"{', '.join(sorted(own))}",
            )
        if policy.engines_of not in (None, ACTOR):
            yield (
                "policies.engines_of",
                f"policies.{name}.engines_of",
                f"policies.{name}.engines_of is {policy.engines_of!r}, whose engines were never shared; name {ACTOR}",
            )


def engine_faults(engines: Mapping[str, Sequence[Engines]]) -> Faults:
    """Yields groups of servers whose name another policy's has: logs and metrics go by it."""
    owners: dict[str, str] = {}
    for policy, groups in engines.items():
        for group in groups:
            if group.borrowed:
                continue
            if (other := owners.setdefault(group.name, policy)) != policy:
                yield (
                    "policies.engine_name",
                    group.name,
                    f"policies.{policy}: its engines have a group {group.name}, and so have those of {other}; give it "
                    "another name",
                )


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`, mapping by mapping."""
    out = dict(base)
    for key, value in changes.items():
        inner = out.get(key)
        out[key] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return out


def derived(run: Mapping[str, Any], name: str, policy: Policy) -> dict[str, Any]:
    """The configuration of policy `name` as a tree, made of the run's, `run`, as far as that was given."""
    own = {**run, "policies": {}, "model": merged(run["model"], policy.model)}
    trainer = dict(run.get("trainer", {}))
    if own["model"]["path"] != run["model"]["path"]:
        trainer.pop("load", None)
    own["trainer"] = merged(trainer, policy.trainer)
    # Another algorithm begins with defaults of its own.
    base = {} if "name" in policy.algorithm else run.get("algorithm", {})
    own["algorithm"] = merged(base, policy.algorithm)
    for key in OBJECTIVES.keys() & policy.algorithm.keys():
        own["algorithm"][key] = merged_objective(base.get(key), policy.algorithm[key])
    own["algorithm"].pop("credit", None)  # given once, for the trajectories of all policies
    own["rollout"] = {**run["rollout"], "engines": _engines(run["rollout"], name, policy)}
    return own


def _engines(rollout: Mapping[str, Any], name: str, policy: Policy) -> list[dict[str, Any]]:
    if policy.engines is not None:
        return [group.model_dump(exclude_unset=True) for group in policy.engines]
    groups = [dict(each) for each in rollout.get("engines", ({},)) if not each.get("frozen")]
    for group in groups if policy.engines_of is None else ():
        group["name"] = name if len(groups) == 1 else f"{name}-{group.get('name', ACTOR)}"
        if "path" in policy.model:
            group.pop("model", None)  # a copy of the actor's
    return groups
