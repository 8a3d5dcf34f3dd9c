"""Rules about rollout workers."""

from __future__ import annotations

from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.rollout import Proxy, Rollout, WorkerResources


def several(rollout: Rollout) -> bool:
    """Returns True if the configuration asks for rollout workers."""
    return rollout.workers not in (1, "auto")


@rule("workers.idle", "rollout.workers")
def have_engines(rollout: Rollout, served: ServedEngines) -> Problems:
    if several(rollout) and not served.policy:
        yield f"rollout.workers is {rollout.workers}, but no engine generates rollouts; remove rollout.workers"


@rule("workers.proxy", "rollout.proxy")
def serve_agents_on_their_machines(rollout: Rollout) -> Problems:
    default = Proxy()
    for key in ("host", "port"):
        value = getattr(rollout.proxy, key)
        if several(rollout) and value != getattr(default, key):
            yield (
                f"rollout.proxy.{key} is {value}, but each of the {rollout.workers} rollout workers has an agents' "
                f"server, which agents on its machine use; remove rollout.proxy.{key}, or set rollout.workers=1"
            )


@rule("workers.resources", "rollout.worker_resources")
def are_used(rollout: Rollout) -> Problems:
    if rollout.workers == 1 and rollout.worker_resources != WorkerResources():
        yield (
            "rollout.worker_resources has no effect with rollout.workers=1, because the driver generates the rollouts; "
            "remove it, or raise rollout.workers"
        )
