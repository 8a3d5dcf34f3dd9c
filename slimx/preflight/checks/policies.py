"""The rule that keeps several trained policies from real runs until a resumed one has been seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slimx.config.rule import rule
from slimx.config.sections.policies import Policy


@rule("policies.never_ran", about="policies")
def has_run(policies: Mapping[str, Policy], local_device: str) -> Iterator[str]:
    """Steps ran on real parts; what a resumed run does was not compared (docs/support.md). `slimx plan` may plan it."""
    for name, policy in policies.items():
        if policy.shares is None:
            yield (
                f"policies.{name} has weights of its own, and no run of several trained policies was seen to go on "
                f"after a resume as a whole one does; set policies.{name}.shares=actor, or leave it out"
            )
