"""Needs of a worker's process: the resources that it reserves, and the states in which it is replaced."""

from __future__ import annotations

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimx.config.sections.rollout import Rollout, WorkerResources
from slimx.errors import SlimxError, duration
from slimx.extras.rollout_workers.messages import Health
from slimx.json_types import Json

BLOCKED = "workers.blocked"
"""Code of the error about a blocked worker."""


def ailment(health: Health, worker: str, options: Rollout) -> SlimxError | None:
    """Returns the reason why the process of `worker` must be replaced; None if it need not be."""
    if health.blocked_s > options.worker_deadline:
        return SlimxError(
            f"the event loop of {worker} has been blocked for {duration(health.blocked_s)} by a hook of group "
            f"{health.group} in {health.location}; make that call asynchronous, or run it with asyncio.to_thread",
            code=BLOCKED,
            about=str(health.group),
        )
    limit = options.worker_resources.memory
    if limit is not None and health.memory > limit * 2**30:
        return SlimxError(
            f"{worker} uses {health.memory / 2**30:.1f} GiB, more than rollout.worker_resources.memory={limit:g}; "
            "correct the hook that keeps memory, or raise the limit",
            code="workers.memory",
            about=worker,
        )
    return None


def resources(options: WorkerResources, node: str | None) -> Json:
    """Returns Ray's options for a worker. `node`: id of the node of its predecessor, which is preferred, because the
    journal may be there; None to spread workers over the nodes."""
    affinity: Json = {"scheduling_strategy": "SPREAD"}
    if node is not None:
        affinity = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
    memory = {} if options.memory is None else {"memory": options.memory * 2**30}
    labels = {"label_selector": options.labels} if options.labels else {}
    return {"num_cpus": options.cpus, "num_gpus": options.gpus, **memory, **labels, **affinity}
