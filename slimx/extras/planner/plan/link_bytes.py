"""Bytes that a publication sends over each kind of link, given the placement of trainers and engines."""

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
    """Returns the number of bytes that a publication sends over each kind of link.

    With `cuda_ipc`, bytes that one rank sends to another stay within one GPU or use NVLink or the network, depending on
    the GPUs of the two ranks. With `memory`, all bytes pass through host memory; with `disk`, through files. With
    Hugging Face names, all bytes are sent to the first rank of an engine, which sends them to the other ranks over the
    engine's links; these transfers are not counted."""
    wire = wire_bytes(plan)
    gpu = machine.gpu
    if transport in ("memory", "disk"):
        total = int(wire.nbytes.sum()) * sum(group.count for group in groups)
        busiest = int(wire.received(plan.targets).max())
        if transport == "disk":
            return (_link("files", total, busiest, None),)
        rate = gpu.host if gpu else None
        return (_link(_HOST, total, busiest, rate),)
    kinds = ("one GPU", "NVLink", "network")
    traffic = {name: np.zeros((2, places.nodes * places.per_node), dtype=np.int64) for name in kinds}
    domain = machine.domain
    for place in places.engines:
        # Trainer rank i is on GPU i.
        sources = wire.sources
        targets = np.array(place.gpus)[wire.targets]
        joined = sources // domain == targets // domain
        masks = (sources == targets, joined & (sources != targets), ~joined)
        for name, mask in zip(kinds, masks, strict=True):
            np.add.at(traffic[name][0], sources[mask], wire.nbytes[mask])
            np.add.at(traffic[name][1], targets[mask], wire.nbytes[mask])
    rates: dict[str, float] = {}
    if gpu is not None:
        rates = {"one GPU": gpu.bandwidth / 2, "NVLink": gpu.nvlink, "network": gpu.network}
    out = []
    for name, nbytes in traffic.items():
        if nbytes.any():
            out.append(_link(name, int(nbytes[0].sum()), int(nbytes.max()), rates.get(name)))
    return tuple(out)


class DealtPlan(NamedTuple):
    """Publication plan with its bytes divided among trainer ranks, for all engines of a run
    (`slimx.extras.direct.dealing`)."""

    plan: Plan
    receivers: list[int]
    """Number of receivers in each engine."""
    edges: list[int]
    """Index of the first target rank of each receiver, followed by the total number of target ranks."""


def direct_link_bytes(dealt: DealtPlan, places: RankMap, machine: Machine, *, on_gpus: bool) -> tuple[LinkBytes, ...]:
    """Returns the number of bytes that a publication with `nixl` sends over each kind of link: the network between
    nodes; within a node, NVLink with `on_gpus`, otherwise host memory."""
    wire = wire_bytes(dealt.plan)
    receivers: list[np.ndarray] = []
    for place, count in zip(places.engines, dealt.receivers, strict=True):
        receivers += np.split(np.array(place.gpus), count)
    node = np.zeros(dealt.plan.targets, dtype=np.int64)
    for gpus, (first, end) in zip(receivers, pairwise(dealt.edges), strict=True):
        node[first:end] = gpus[0] // places.per_node
    within = wire.sources // places.per_node == node[wire.targets]
    local = "NVLink" if on_gpus else _HOST
    rates: dict[str, float] = {}
    if machine.gpu is not None:
        rates = {"NVLink": machine.gpu.nvlink, _HOST: machine.gpu.host, "network": machine.gpu.network}
    out = []
    for link, mask in ((local, within), ("network", ~within)):
        if mask.any():
            nbytes = wire.nbytes[mask]
            sent = np.bincount(wire.sources[mask], weights=nbytes)
            received = np.bincount(wire.targets[mask], weights=nbytes)
            busiest = int(max(sent.max(), received.max()))
            out.append(_link(link, int(nbytes.sum()), busiest, rates.get(link)))
    return tuple(out)


def _link(link: str, nbytes: int, busiest: int, rate: float | None) -> LinkBytes:
    seconds = None
    if rate:
        seconds = busiest / rate
    return LinkBytes(link=link, nbytes=nbytes, busiest=busiest, seconds=seconds)
