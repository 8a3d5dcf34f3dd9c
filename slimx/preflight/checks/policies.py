"""The rule that keeps several trained policies from real runs until one has been seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slimx.config.rule import rule
from slimx.config.sections.policies import Policy


@rule("policies.never_ran", about="policies")
def has_run(policies: Mapping[str, Policy], local_device: str) -> Iterator[str]:
    """Loop, checkpoints and rollouts ran in one process only (docs/support.md): `slimx plan` may plan such a run."""
    for name, policy in policies.items():
        if policy.shares is None:
            yield (
                f"policies.{name} has weights of its own, and a run of several trained policies was never seen on real "
                f"trainers and engines; set policies.{name}.shares=actor, or leave it out"
            )
