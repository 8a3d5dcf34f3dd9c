"""Rules about engine groups beside the schedule and the publication of a run; what a group says alone is checked in
`slimx.config.sections.engines`."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import rule
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Cluster
from slimx.config.sections.schedule import Schedule


@rule("engines.urls_transport", about="publish.transport")
def reached(rollout: Rollout, publish: Publish) -> Iterator[str]:
    for group in rollout.policy_engines:
        if group.urls and publish.transport not in ("auto", "memory", "disk"):
            yield (
                f"publish.transport {publish.transport} needs a process of slimx beside each server, and "
                f"{group.where} has urls, servers that slimx did not start; set publish.transport=disk, or memory on "
                "the trainers' machine"
            )


@rule("engines.urls_colocate", about="schedule.colocate")
def placed(rollout: Rollout, schedule: Schedule) -> Iterator[str]:
    for group in rollout.policy_engines:
        if group.urls and schedule.colocate:
            yield (
                f"schedule.colocate with {group.where}, which has urls: slimx knows no place of servers that run "
                "already; let slimx start them, or set schedule.colocate=false"
            )


@rule("engines.nodes_transport", about="publish.transport")
def on_one_machine(rollout: Rollout, publish: Publish) -> Iterator[str]:
    for group in rollout.policy_engines:
        if group.nodes > 1 and publish.one_machine:
            yield (
                f"publish.transport {publish.transport} reaches one machine, and a server of {group.where} spans "
                f"{group.nodes}; set it to auto, nixl or disk"
            )


@rule("publish.delta_transport", about="publish.delta")
def changes_travel(publish: Publish) -> Iterator[str]:
    if publish.delta is not None and publish.transport not in ("nixl", "disk"):
        yield (
            f"publish.delta with publish.transport {publish.transport}: changes alone travel with nixl or disk, and "
            "all other transports bring whole weights; set publish.transport=nixl or disk, or leave publish.delta out"
        )


@rule("publish.delta_beside", about="publish.delta")
def put_together(rollout: Rollout, publish: Publish) -> Iterator[str]:
    for group in rollout.policy_engines if publish.changes_on_disk else ():
        if group.urls or group.nodes > 1:
            what = "urls, servers that slimx did not start" if group.urls else f"servers over {group.nodes} machines"
            yield (
                f"publish.delta with publish.transport disk: a process of slimx beside each server puts its weights "
                f"together on one machine, and {group.where} has {what}; leave publish.delta out"
            )


@rule("engines.disaggregated_colocate", about="schedule.colocate")
def kept_awake(rollout: Rollout, schedule: Schedule) -> Iterator[str]:
    if rollout.disaggregated and schedule.colocate:
        yield (
            "schedule.colocate with prefill and decode groups: their KV cache is registered for transfers and cannot "
            "be given back while they sleep; set schedule.colocate=false"
        )


@rule("engines.disaggregated_stale", about="schedule.max_staleness")
def one_version(rollout: Rollout, schedule: Schedule) -> Iterator[str]:
    if rollout.disaggregated and schedule.max_staleness:
        yield (
            f"schedule.max_staleness {schedule.max_staleness} with prefill and decode groups: a prompt's KV could be "
            "computed by one version and sampled from by the next; set schedule.max_staleness=0"
        )


@rule("engines.trusted_network", about="cluster.trusted_network")
def trusted(rollout: Rollout, cluster: Cluster) -> Iterator[str]:
    for group in rollout.served:
        if group.nodes > 1 and group.dp_attention > 1 and not group.urls and not cluster.trusted_network:
            yield (
                f"{group.where} has dp_attention {group.dp_attention} over {group.nodes} nodes, where SGLang unpickles "
                "what arrives at its sockets: whoever can send from one of these machines runs programs on all of "
                "them; set cluster.trusted_network to true, or to the CIDR of a network that only this run's users "
                "reach"
            )
