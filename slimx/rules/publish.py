"""Rules about the publication of weights: the machines and weights that `publish.transport` supports."""

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
def reaches_urls(rollout: Rollout, publish: Publish) -> Problems:
    for group in rollout.policy_engines:
        if group.urls and publish.transport not in ("auto", "memory", "disk"):
            yield (
                f"it needs a slimx process at each server, but {group.where} has urls of external servers; set it to "
                "disk, or to memory on the trainers' machine"
            )


@rule("engines.nodes_transport", "publish.transport")
def on_one_machine(rollout: Rollout, publish: Publish) -> Problems:
    for group in rollout.policy_engines:
        if group.nodes > 1 and publish.one_machine:
            yield f"a server of {group.where} spans {group.nodes} machines; set it to auto, nixl or disk"


@rule("engines.urls_elsewhere", "publish.transport")
def reaches_servers(rollout: Rollout, publish: Publish, cluster: Cluster, device: str) -> Problems:
    if not publish.one_machine or cluster.ray_address is not None:  # without it trainers are local
        return
    for name, host in rollout.external_hosts.items():
        if not is_local(host):
            yield f"engine {name} runs at {host}, which is not an address of the trainers' machine; set it to disk"


@rule("publish.machines", "publish.transport")
def stays_on_one_machine(publish: Publish, cluster: Cluster, rollout: Rollout, device: str) -> Problems:
    """Refuses transports of one machine for several nodes of unknown size, on any of which engines may run."""
    from slimx.preflight.hardware import nodes_known

    if nodes_known(cluster, device) or not publish.one_machine or (cluster.nodes or 1) == 1:
        return
    for group in rollout.policy_engines:
        if group.started:
            remedy = "set it to auto"
            if device != "cpu":
                remedy += ", or set cluster.gpus_per_node, which determines the servers' nodes"
            yield (
                f"it reaches one machine, but cluster.nodes is {cluster.nodes} and servers of {group.where} may be on "
                f"any of them; {remedy}"
            )
            return


@rule("publish.idle_nodes", "publish.transport")
def leaves_no_node_idle(
    publish: Publish, schedule: Schedule, trainer: Trainer, cluster: Cluster, rollout: Rollout, device: str
) -> Problems:
    """Refuses transports of one machine if colocated trainers span nodes: engines would be on the first node only."""
    from slimx.preflight.hardware import machine_of, nodes_known

    if not nodes_known(cluster, device) or not rollout.policy_engines:
        return
    per_node = machine_of(cluster).per_node
    if schedule.colocate and publish.one_machine and trainer.world_size > per_node:
        yield (
            "it reaches engines on the node of trainer rank 0 only, and with schedule.colocate the "
            f"{trainer.world_size - per_node} GPUs of the other nodes (trainer.world_size {trainer.world_size}, "
            f"{per_node} per node) would idle while engines generate; set it to auto, nixl or disk, with servers on "
            "every node"
        )


@rule("publish.delta_transport", "publish.delta")
def sends_deltas(publish: Publish) -> Problems:
    if publish.delta is not None and publish.transport not in ("nixl", "disk"):
        yield (
            f"publish.transport={publish.transport} always sends all weights; set that to nixl or disk, which send "
            "deltas, or leave it out"
        )


@rule("policies.transport", "publish.transport")
def publishes_over_memory(policies: Mapping[str, Policy], publish: Publish, device: str) -> Problems:
    """Checks the chosen transport of each policy against all policies of the run."""
    if publish.transport != "memory" and any(policy.shares is None for policy in policies.values()):
        yield (
            "several trained policies were proven with memory only; set it to memory, with trainers and engines of all "
            "policies on one machine"
        )
