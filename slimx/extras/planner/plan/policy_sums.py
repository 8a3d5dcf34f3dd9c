"""Sums of the requirements of all trained policies of a run, and the rules that these sums must satisfy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slimx.config.rule import broken
from slimx.errors import SlimxError
from slimx.extras.planner.memory_record import DiskBytes, HostMemory, MemoryPart
from slimx.extras.planner.record import PlanReport, Together
from slimx.extras.planner.rules.machine import has_nodes
from slimx.extras.planner.rules.memory import fits_host
from slimx.preflight.hardware import Machine


def sum_over_policies(reports: Sequence[PlanReport]) -> Together | None:
    """Returns the sums over `reports`, one report per policy; the GPUs of each policy follow those of the previous one.
    None if the ranks of a policy could not be placed."""
    gpus = 0
    hosts: list[HostMemory] = []
    disks: list[DiskBytes] = []
    peaks: list[int] = []
    for report in reports:
        if report.rank_map is None:
            return None
        gpus += report.rank_map.gpus
        per_node = report.rank_map.per_node
        peaks += [phase.nbytes for phase in report.phases]
        if report.host is not None:
            hosts.append(report.host)
        if report.disk is not None:
            disks.append(report.disk)
    nodes = -(-gpus // per_node)
    return Together(
        gpus=gpus,
        nodes=nodes,
        per_node=per_node,
        fullest=max(peaks, default=None),
        host=_host(hosts) if nodes == 1 else None,
        disk=_disk(disks),
    )


def refusals(sums: Together, machine: Machine) -> list[SlimxError]:
    """Returns errors about the number of nodes and about host memory that apply to all policies together."""
    rules = (has_nodes,) if sums.host is None else (has_nodes, fits_host)
    return broken(rules, {"machine": machine, "places": sums, "host": sums.host})


def _host(hosts: Sequence[HostMemory]) -> HostMemory | None:
    """Returns the host memory of the single node that all policies share; None if no policy's host memory is known."""
    if not hosts:
        return None
    ranks = 0
    parts: Counter[str] = Counter()
    for host in hosts:
        ranks += host.ranks
        for part in host.parts:
            parts[part.name] += part.nbytes
    return HostMemory(
        memory=hosts[0].memory,
        ranks=ranks,
        parts=tuple(MemoryPart(name=name, nbytes=nbytes) for name, nbytes in parts.most_common()),
    )


def _disk(disks: Sequence[DiskBytes]) -> DiskBytes | None:
    """Returns the disk space of all policies together; each checkpoint and each export contains all of them."""
    if not disks:
        return None
    checkpoint = 0
    export = 0
    rollouts = 0
    for disk in disks:
        checkpoint += disk.checkpoint
        export += disk.export
        rollouts += disk.rollouts
    return DiskBytes(
        checkpoint=checkpoint,
        checkpoints=disks[0].checkpoints,
        export=export,
        exports=disks[0].exports,
        rollouts=rollouts,
    )
