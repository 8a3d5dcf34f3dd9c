"""Whether engine groups fit the schedule and the publication of a run; what each group says alone is checked in
`slimx.config.engines`."""

from __future__ import annotations

from slimx.config.rollout import Rollout
from slimx.config.schedule import Publish, Schedule


def check_serving(rollout: Rollout, schedule: Schedule, publish: Publish) -> None:
    """Raise ValueError for policy groups that could not be published to, or could not take turns with trainers."""
    for group in rollout.policy_engines:
        where = f"rollout.engines group {group.name}"
        if group.urls and publish.transport not in ("memory", "disk"):
            raise ValueError(
                f"publish.transport {publish.transport} needs a process of slimx beside each server, and {where} has "
                "urls, servers that slimx did not start; set publish.transport=disk, or memory on the trainers' machine"
            )
        if group.urls and schedule.colocate:
            raise ValueError(
                f"schedule.colocate with {where}, which has urls: slimx knows no place of servers that run already; "
                "let slimx start them, or set schedule.colocate=false"
            )
        if group.nodes > 1 and publish.one_machine:
            raise ValueError(
                f"publish.transport {publish.transport} reaches one machine, and a server of {where} spans "
                f"{group.nodes}; set it to gloo, nccl or disk"
            )
    if not rollout.disaggregated:
        return
    if schedule.colocate:
        raise ValueError(
            "schedule.colocate with prefill and decode groups: their KV cache is registered for transfers and cannot "
            "be given back while they sleep; set schedule.colocate=false"
        )
    if schedule.max_staleness:
        raise ValueError(
            f"schedule.max_staleness {schedule.max_staleness} with prefill and decode groups: a prompt's KV could be "
            "computed by one version and sampled from by the next; set schedule.max_staleness=0"
        )


def check_served_teacher(name: str | None, rollout: Rollout) -> None:
    """Raise ValueError for an `algorithm.teacher_engine` that no frozen group is called, or that would score rollouts
    under another distribution than the one they are sampled from."""
    if name is None:
        return
    if name not in (frozen := [group.name for group in rollout.engines if group.frozen]):
        have = f"the frozen groups of rollout.engines are {', '.join(frozen)}" if frozen else "no group is frozen"
        raise ValueError(
            f"algorithm.teacher_engine is {name}, and {have}; add a group with this name, frozen: true and the "
            "teacher's model to rollout.engines"
        )
    sampling, neutral = rollout.sampling, {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    for key, value in neutral.items():
        if getattr(sampling, key) != value:
            raise ValueError(
                f"algorithm.teacher_engine with rollout.sampling.{key}={getattr(sampling, key):g}: SGLang scores given "
                f"tokens at temperature 1 over the whole vocabulary; set {key} to {value:g}, or algorithm.teacher, "
                "which trainers score as the policy samples"
            )


def check_network(rollout: Rollout, trusted: bool | str | None) -> None:
    """Raise ValueError for servers that run what is sent to them over a network, unless the network is `trusted`."""
    for group in rollout.served:
        if group.nodes > 1 and group.dp_attention > 1 and not group.urls and not trusted:
            raise ValueError(
                f"rollout.engines group {group.name} has dp_attention {group.dp_attention} over {group.nodes} nodes, "
                "where SGLang unpickles what arrives at its sockets: whoever can send from one of these machines runs "
                "programs on all of them; set cluster.trusted_network to true, or to the CIDR of a network that only "
                "this run's users reach"
            )
