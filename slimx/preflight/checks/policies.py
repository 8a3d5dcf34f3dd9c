"""The rule about several trained policies that needs to know where a run takes place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slimx.config.rule import rule
from slimx.config.sections.policies import Policy
from slimx.config.sections.publish import Publish


@rule("policies.transport", about="publish.transport")
def publishes_over_memory(policies: Mapping[str, Policy], publish: Publish, device: str) -> Iterator[str]:
    """Asked of the transport that is chosen, where the configuration leaves it open; of each policy with all that the
    run has."""
    if publish.transport != "memory" and any(policy.shares is None for policy in policies.values()):
        yield (
            f"publish.transport is {publish.transport} here, and several trained policies were proven with memory "
            "alone; set publish.transport=memory, with trainers and engines of all policies on one machine"
        )
