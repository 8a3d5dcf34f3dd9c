"""Over which links the bytes of a publication go, from where trainers and engines stand."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from slimx.extras.direct.wire import wire_bytes
from slimx.extras.planner.record import LinkBytes, PlannedGroup, RankMap
from slimx.preflight.hardware import Machine
from slimx.reshard.plan.copy_plan import Plan

_HOST = "host memory (PCIe)"


def link_bytes(
    plan: Plan, places: RankMap, groups: tuple[PlannedGroup, ...], machine: Machine, transport: str
) -> tuple[LinkBytes, ...]:
    """Bytes by kind of link. With `cuda_ipc` they go where the two ranks stand: within one GPU or over NVLink;
    `memory` takes them through host memory, `disk` through files.

    A publication of Hugging Face names goes to each rank of an engine whole, from its first rank on over the engine's
    own links, which are not counted."""
    wire = wire_bytes(plan)
    gpu = machine.gpu
    if transport in ("memory", "disk"):
        total = int(wire.nbytes.sum()) * sum(group.count for group in groups)
        link, rate = (_HOST, gpu.host if gpu else None) if transport == "memory" else ("files", None)
        busiest = int(wire.received(plan.targets).max())
        return (_made(link, total, busiest, rate),)
    kinds = ("one GPU", "NVLink", "network")
    traffic = {name: np.zeros((2, places.nodes * places.per_node), dtype=np.int64) for name in kinds}
    domain = machine.domain
    for place in places.engines:
        # Trainers fill the GPUs in order.
        here, there = wire.sources, np.array(place.gpus)[wire.targets]
        joined = here // domain == there // domain
        chosen = (here == there, joined & (here != there), ~joined)
        for name, taken in zip(kinds, chosen, strict=True):
            for side, at in enumerate((here[taken], there[taken])):
                np.add.at(traffic[name][side], at, wire.nbytes[taken])
    rates = (gpu.bandwidth / 2, gpu.nvlink, gpu.network) if gpu else (None, None, None)
    return tuple(
        _made(name, int(moved[0].sum()), int(moved.max()), rate)
        for (name, moved), rate in zip(traffic.items(), rates, strict=True)
        if moved.any()
    )


class DealtPlan(NamedTuple):
    """A plan dealt out for all engines of a run (`slimx.extras.direct.dealing`)."""

    plan: Plan
    receivers: list[int]
    """Number of receivers of each engine."""
    edges: list[int]
    """First target of each receiver, and the end of all."""


def direct_link_bytes(dealt: DealtPlan, places: RankMap, machine: Machine, *, on_gpus: bool) -> tuple[LinkBytes, ...]:
    """Bytes by kind of link with `nixl`: over the network, or within a node through its memory, with `on_gpus` over
    NVLink."""
    wire, gpu = wire_bytes(dealt.plan), machine.gpu
    each = places.per_node
    node = np.zeros(dealt.plan.targets, dtype=np.int64)
    engines = zip(places.engines, dealt.receivers, strict=True)
    shares = [gpus for place, count in engines for gpus in np.split(np.array(place.gpus), count)]
    for gpus, (first, end) in zip(shares, pairwise(dealt.edges), strict=True):
        node[first:end] = gpus[0] // each
    within = wire.sources // each == node[wire.targets]
    inside = ("NVLink", gpu and gpu.nvlink) if on_gpus else (_HOST, gpu and gpu.host)
    out = []
    for (link, rate), taken in ((inside, within), (("network", gpu and gpu.network), ~within)):
        if taken.any():
            sides = (np.bincount(ranks[taken], weights=wire.nbytes[taken]) for ranks in (wire.sources, wire.targets))
            out.append(_made(link, int(wire.nbytes[taken].sum()), int(max(side.max() for side in sides)), rate))
    return tuple(out)


def _made(link: str, nbytes: int, busiest: int, rate: float | None) -> LinkBytes:
    return LinkBytes(link=link, nbytes=nbytes, busiest=busiest, seconds=busiest / rate if rate else None)
