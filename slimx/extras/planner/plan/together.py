"""Sums what all trained policies of a run need, and refuses what a machine has not for all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slimx.config.rule import broken
from slimx.errors import SlimxError
from slimx.extras.planner.memory_record import DiskBytes, Held, HostMemory
from slimx.extras.planner.record import PlanReport, Together
from slimx.extras.planner.rules.machine import has_nodes
from slimx.extras.planner.rules.memory import fits_host
from slimx.preflight.hardware import Machine


def together(reports: Sequence[PlanReport]) -> Together | None:
    """The sums over `reports`, each policy's, whose GPUs follow one another; None where one could not be placed."""
    places = [report.rank_map for report in reports if report.rank_map is not None]
    if len(places) < len(reports):
        return None
    gpus, per_node = sum(each.gpus for each in places), places[0].per_node
    nodes = -(-gpus // per_node)
    return Together(
        gpus=gpus,
        nodes=nodes,
        per_node=per_node,
        fullest=max((phase.nbytes for report in reports for phase in report.phases), default=None),
        host=_host([report.host for report in reports if report.host is not None]) if nodes == 1 else None,
        disk=_disk([report.disk for report in reports if report.disk is not None]),
    )


def refusals(all_of_them: Together, machine: Machine) -> list[SlimxError]:
    """Refusals of nodes and host memory that no policy breaks alone."""
    facts = {"machine": machine, "places": all_of_them}
    return broken((has_nodes, fits_host), facts if all_of_them.host is None else facts | {"host": all_of_them.host})


def _host(each: Sequence[HostMemory]) -> HostMemory | None:
    """Host memory of the one node that all are on."""
    if not each:
        return None
    held: Counter[str] = Counter()
    for one in each:
        for part in one.held:
            held[part.what] += part.nbytes
    return HostMemory(
        memory=each[0].memory,
        ranks=sum(one.ranks for one in each),
        held=tuple(Held(what=what, nbytes=nbytes) for what, nbytes in held.most_common()),
    )


def _disk(each: Sequence[DiskBytes]) -> DiskBytes | None:
    """Bytes on disk: a checkpoint and an export hold every policy, and are as many as of one."""
    if not each:
        return None
    return DiskBytes(
        checkpoint=sum(one.checkpoint for one in each),
        checkpoints=each[0].checkpoints,
        export=sum(one.export for one in each),
        exports=each[0].exports,
        rollouts=sum(one.rollouts for one in each),
    )
