"""Rules about how weights are published: what `publish.transport` reaches and brings."""

from __future__ import annotations

from collections.abc import Mapping

from slimx.config.rule import Problems, rule
from slimx.config.sections.policies import Policy
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Cluster
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer
from slimx.runtime.ports import is_local


@rule("engines.urls_transport", "publish.transport")
def reached(rollout: Rollout, publish: Publish) -> Problems:
    for group in rollout.policy_engines:
        if group.urls and publish.transport not in ("auto", "memory", "disk"):
            yield (
                f"it needs a process of slimx at each server, and {group.where} has urls, servers that slimx did not "
                "start; set it to disk, or to memory on the trainers' machine"
            )


@rule("engines.nodes_transport", "publish.transport")
def on_one_machine(rollout: Rollout, publish: Publish) -> Problems:
    for group in rollout.policy_engines:
        if group.nodes > 1 and publish.one_machine:
            yield f"a server of {group.where} spans {group.nodes} machines; set it to auto, nixl or disk"


@rule("engines.urls_elsewhere", "publish.transport")
def reaches_servers(rollout: Rollout, publish: Publish, cluster: Cluster, device: str) -> Problems:
    if not publish.one_machine or cluster.ray_address is not None:  # else trainers are here
        return
    for name, host in rollout.external_hosts.items():
        if not is_local(host):
            yield f"engine {name} runs at {host}, which is no address of the trainers' machine; set it to disk"


@rule("publish.machines", "publish.transport")
def stays_on_one_machine(publish: Publish, cluster: Cluster, rollout: Rollout, device: str) -> Problems:
    """A run on several machines may have engines on any of them, unless the sizes of nodes say where."""
    from slimx.preflight.hardware import nodes_known

    if nodes_known(cluster, device) or not publish.one_machine or (cluster.nodes or 1) == 1:
        return
    for group in rollout.policy_engines:
        if group.started:
            sizes = "" if device == "cpu" else ", or give cluster.gpus_per_node, which says where servers would be"
            yield (
                f"it reaches one machine, and cluster.nodes is {cluster.nodes}: servers of {group.where} may be on any "
                f"of these; set it to auto{sizes}"
            )
            return


@rule("publish.idle_nodes", "publish.transport")
def leaves_no_node_idle(
    publish: Publish, schedule: Schedule, trainer: Trainer, cluster: Cluster, rollout: Rollout, device: str
) -> Problems:
    """Engines that take turns with trainers are where these are: one machine's transport keeps them on the first."""
    from slimx.preflight.hardware import machine_of, nodes_known

    if not nodes_known(cluster, device) or not rollout.policy_engines:
        return
    per_node = machine_of(cluster).per_node
    if schedule.colocate and publish.one_machine and trainer.world_size > per_node:
        yield (
            "it reaches engines on the node of trainer rank 0 alone, and with schedule.colocate the "
            f"{trainer.world_size - per_node} GPUs of the other nodes (trainer.world_size {trainer.world_size}, "
            f"{per_node} a node) would idle while engines generate; set it to auto, nixl or disk, with servers on "
            "every node"
        )


@rule("publish.delta_transport", "publish.delta")
def changes_travel(publish: Publish) -> Problems:
    if publish.delta is not None and publish.transport not in ("nixl", "disk"):
        yield (
            f"publish.transport={publish.transport} brings whole weights; set that to nixl or disk, with which changes "
            "travel alone, or leave it out"
        )


@rule("policies.transport", "publish.transport")
def publishes_over_memory(policies: Mapping[str, Policy], publish: Publish, device: str) -> Problems:
    """Asked of the transport that is chosen, where the configuration leaves it open; of each policy with all that the
    run has."""
    if publish.transport != "memory" and any(policy.shares is None for policy in policies.values()):
        yield (
            "several trained policies were proven with memory alone; set it so, with trainers and engines of all "
            "policies on one machine"
        )
