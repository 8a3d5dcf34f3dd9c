"""Over which links the bytes of a publication go, from where trainers and engines stand."""

from __future__ import annotations

import numpy as np

from slimx.preflight.hardware import Machine
from slimx.preflight.record import LinkBytes, PlannedGroup, RankMap
from slimx.reshard.plan.publication import PublicationPlan
from slimx.reshard.plan.wire import wire_bytes


def link_bytes(
    published: PublicationPlan, places: RankMap, groups: tuple[PlannedGroup, ...], machine: Machine, transport: str
) -> tuple[LinkBytes, ...]:
    """Bytes by kind of link. Between GPUs they go where the two ranks stand: within one GPU, over NVLink or over the
    network; `memory` takes them through host memory, `disk` through files, `gloo` over the network's sockets.

    A publication of Hugging Face names goes to each rank of an engine whole, from its first rank on over the engine's
    own links, which are not counted."""
    plan = published.plan
    wire = wire_bytes(plan)
    gpu = machine.gpu
    if transport in ("memory", "disk"):
        total = int(wire.nbytes.sum()) * sum(group.count for group in groups)
        link, rate = ("host memory (PCIe)", gpu.host if gpu else None)
        if transport == "disk":
            link, rate = "files", None
        busiest = int(wire.received(plan.targets).max())
        return (LinkBytes(link=link, nbytes=total, busiest=busiest, seconds=busiest / rate if rate else None),)
    traffic: dict[str, np.ndarray] = {
        name: np.zeros((2, places.nodes * places.per_node), dtype=np.int64) for name in ("one GPU", "NVLink", "network")
    }
    domain, trainers = machine.domain, len(places.trainer)
    network, received = traffic["network"], wire.received(plan.targets)
    network[0, :trainers] = wire.sent(trainers) * len(places.engines)  # trainers fill the GPUs in order
    for place in places.engines:
        gpus = np.array(place.gpus)
        network[1, gpus[: plan.targets]] += received
        if transport == "gloo":
            continue
        for joined in np.unique(gpus // domain):  # what NVLink, or the GPU itself, spares the network
            pairs = slice(*np.searchsorted(wire.sources, [joined * domain, (joined + 1) * domain]))
            here, there, nbytes = wire.sources[pairs], gpus[wire.targets[pairs]], wire.nbytes[pairs]
            for link, taken in (("one GPU", here == there), ("NVLink", (there // domain == joined) & (here != there))):
                for side, at in enumerate((here[taken], there[taken])):
                    np.add.at(traffic[link][side], at, nbytes[taken])
                    np.subtract.at(network[side], at, nbytes[taken])
    rates = {
        "one GPU": gpu.bandwidth / 2 if gpu else None,
        "NVLink": gpu.nvlink if gpu else None,
        "network": gpu.network if gpu and transport != "gloo" else None,
    }
    out = []
    for name, moved in traffic.items():
        total, busiest = int(moved[0].sum()), int(moved.max())
        if total:
            rate = rates[name]
            out.append(LinkBytes(link=name, nbytes=total, busiest=busiest, seconds=busiest / rate if rate else None))
    return tuple(out)
