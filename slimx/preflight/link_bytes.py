"""Over which links the bytes of a publication go, from where trainers and engines stand."""

from __future__ import annotations

import numpy as np

from slimx.config.schema import Config
from slimx.preflight.hardware import Machine
from slimx.preflight.link_model import wire_bytes
from slimx.preflight.plan_record import EngineGroup, LinkBytes, RankMap
from slimx.preflight.publication import PublicationPlan


def link_bytes(
    published: PublicationPlan, places: RankMap, groups: tuple[EngineGroup, ...], machine: Machine, config: Config
) -> tuple[LinkBytes, ...]:
    """Bytes by kind of link. Between GPUs they go where the two ranks stand: within one GPU, over NVLink or over the
    network; `memory` takes them through host memory, `disk` through files, `gloo` over the network's sockets.

    A publication of Hugging Face names goes to each rank of an engine whole, from its first rank on over the engine's
    own links, which are not counted."""
    plan = published.plan
    sent = wire_bytes(plan, sources=len(places.trainer))  # [sources, targets of one engine]
    gpu = machine.gpu
    if config.publish.transport in ("memory", "disk"):
        total = int(sent.sum()) * sum(group.count for group in groups)
        link, rate = ("host memory (PCIe)", gpu.host if gpu else None)
        if config.publish.transport == "disk":
            link, rate = "files", None
        busiest = int(sent.sum(axis=0).max())
        return (LinkBytes(link=link, nbytes=total, busiest=busiest, seconds=busiest / rate if rate else None),)
    traffic: dict[str, np.ndarray] = {
        name: np.zeros((2, places.nodes * places.per_node), dtype=np.int64) for name in ("one GPU", "NVLink", "network")
    }
    for place in places.engines:
        for target in range(sent.shape[1]):
            there = place.gpus[target]
            for source, nbytes in enumerate(sent[:, target].tolist()):
                here = source  # trainers fill the GPUs in order
                if not nbytes:
                    continue
                link = "one GPU" if here == there else "NVLink" if _joined(here, there, machine) else "network"
                link = "network" if config.publish.transport == "gloo" else link
                traffic[link][0, here] += nbytes
                traffic[link][1, there] += nbytes
    rates = {
        "one GPU": gpu.bandwidth / 2 if gpu else None,
        "NVLink": gpu.nvlink if gpu else None,
        "network": gpu.network if gpu and config.publish.transport != "gloo" else None,
    }
    out = []
    for name, moved in traffic.items():
        total, busiest = int(moved[0].sum()), int(moved.max())
        if total:
            rate = rates[name]
            out.append(LinkBytes(link=name, nbytes=total, busiest=busiest, seconds=busiest / rate if rate else None))
    return tuple(out)


def _joined(here: int, there: int, machine: Machine) -> bool:
    return here // machine.domain == there // machine.domain
