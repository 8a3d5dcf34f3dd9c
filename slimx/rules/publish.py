"""Rules about the publication of weights: the machines and the kinds of weights that `publish.transport` supports."""

from __future__ import annotations

from collections.abc import Mapping

from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.general import Cluster, Schedule
from slimx.config.sections.policies import Policy
from slimx.config.sections.publish import Publish
from slimx.config.sections.trainer import Trainer
from slimx.errors import counted
from slimx.runtime.ports import is_local


@rule("engines.urls_transport", "publish.transport")
def reaches_urls(served: ServedEngines, publish: Publish) -> Problems:
    for group in served.policy:
        if group.urls and publish.transport not in ("auto", "memory", "disk"):
            yield (
                f"publish.transport={publish.transport} needs a slimx process next to each server, but {group.where} "
                "has urls of external servers; set publish.transport=disk, or publish.transport=memory if the servers "
                "are on the trainers' machine"
            )


@rule("engines.nodes_transport", "publish.transport")
def on_one_machine(served: ServedEngines, publish: Publish) -> Problems:
    for group in served.policy:
        if group.nodes > 1 and publish.one_machine:
            yield (
                f"publish.transport={publish.transport} works only on one machine, but a server of {group.where} "
                f"spans {group.nodes} machines; set publish.transport to auto, nixl or disk"
            )


@rule("engines.urls_elsewhere", "publish.transport")
def reaches_servers(served: ServedEngines, publish: Publish, cluster: Cluster, device: str) -> Problems:
    if not publish.one_machine or cluster.ray_address is not None:  # without ray_address, trainers are on this machine
        return
    for name, host in served.external_hosts.items():
        if not is_local(host):
            yield (
                f"publish.transport={publish.transport} works only on one machine, but engine {name} runs at {host}, "
                "which is not an address of the trainers' machine; set publish.transport=disk"
            )


@rule("publish.machines", "publish.transport")
def stays_on_one_machine(publish: Publish, cluster: Cluster, served: ServedEngines, device: str) -> Problems:
    """Rejects transports within one machine if the run has several nodes of unknown size, because engines may be on any
    of them."""
    from slimx.preflight.hardware import nodes_known

    if nodes_known(cluster, device) or not publish.one_machine or (cluster.nodes or 1) == 1:
        return
    for group in served.policy:
        if group.started:
            remedy = "set publish.transport=auto"
            if device != "cpu":
                remedy += ", or set cluster.gpus_per_node, from which slimx computes the node of each server"
            yield (
                f"publish.transport={publish.transport} works only on one machine, but cluster.nodes is "
                f"{cluster.nodes} and servers of {group.where} may be on any node; {remedy}"
            )
            return


@rule("publish.idle_nodes", "publish.transport")
def leaves_no_node_idle(
    publish: Publish, schedule: Schedule, trainer: Trainer, cluster: Cluster, served: ServedEngines, device: str
) -> Problems:
    """Rejects transports within one machine if colocated trainers are on several nodes, because engines would run on
    the first node only."""
    from slimx.preflight.hardware import machine_of, nodes_known

    if not nodes_known(cluster, device) or not served.policy:
        return
    per_node = machine_of(cluster).per_node
    if schedule.colocate and publish.one_machine and trainer.world_size > per_node:
        yield (
            f"publish.transport={publish.transport} reaches only engines on the node of trainer rank 0, so with "
            f"schedule.colocate the {counted(trainer.world_size - per_node, 'GPU')} of the other nodes "
            f"(trainer.world_size {trainer.world_size}, {per_node} per node) would be idle during generation; set "
            "publish.transport to auto, nixl or disk, and run servers on every node"
        )


@rule("publish.delta_transport", "publish.delta")
def sends_deltas(publish: Publish) -> Problems:
    if publish.delta is not None and publish.transport not in ("nixl", "disk"):
        yield (
            f"publish.delta is set, but publish.transport={publish.transport} always sends all weights; set "
            "publish.transport to nixl or disk, or remove publish.delta"
        )


@rule("policies.transport", "publish.transport")
def publishes_over_memory(policies: Mapping[str, Policy], publish: Publish, device: str) -> Problems:
    """Rejects every `publish.transport` except "memory" if several policies are trained, because no other transport has
    been tested with several policies."""
    if publish.transport != "memory" and any(policy.shares is None for policy in policies.values()):
        yield (
            f"publish.transport={publish.transport} was never tested with several trained policies; set "
            "publish.transport=memory, and run trainers and engines of all policies on one machine"
        )
