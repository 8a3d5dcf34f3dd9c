"""Rules about what `publish.transport` reaches, from where trainers and engines are to be."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from slimx.config.rule import rule
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Cluster
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer
from slimx.preflight.hardware import machine_of, nodes_known


@rule("publish.machines", about="publish.transport")
def stays_on_one_machine(publish: Publish, cluster: Cluster, rollout: Rollout, device: str) -> Iterator[str]:
    """A run on several machines may have engines on any of them, unless the sizes of nodes tell."""
    if nodes_known(cluster, device) or not publish.one_machine or (cluster.nodes or 1) == 1:
        return
    for group in rollout.policy_engines:
        if group.started:
            sizes = "" if device == "cpu" else ", or give cluster.gpus_per_node, which tells where servers would be"
            yield (
                f"publish.transport {publish.transport} reaches one machine, and cluster.nodes is {cluster.nodes}: "
                f"servers of {group.where} may be on any of these; set it to auto{sizes}"
            )
            return


@rule("publish.idle_nodes", about="publish.transport")
def leaves_no_node_idle(
    publish: Publish, schedule: Schedule, trainer: Trainer, cluster: Cluster, rollout: Rollout, device: str
) -> Iterator[str]:
    """Engines that take turns with trainers are where these are: one machine's transport keeps them on the first."""
    if not nodes_known(cluster, device) or not rollout.policy_engines:
        return
    per_node = machine_of(cluster).per_node
    if schedule.colocate and publish.one_machine and trainer.world_size > per_node:
        yield (
            f"publish.transport {publish.transport} reaches engines on the node of trainer rank 0 alone, and with "
            f"schedule.colocate the {trainer.world_size - per_node} GPUs of the other nodes (trainer.world_size "
            f"{trainer.world_size}, {per_node} a node) would idle while engines generate; set it to auto, nixl or "
            "disk, with servers on every node"
        )


@rule("publish.nixl_package", about="publish.transport")
def has_nixl(publish: Publish, local_device: str) -> Iterator[str]:
    if publish.transport == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
        yield (
            "publish.transport=nixl, but the package nixl-cu13 is not installed here; install it as "
            "requirements/ pins it, or set publish.transport=disk"
        )
