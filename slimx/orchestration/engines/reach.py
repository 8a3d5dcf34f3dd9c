"""Check that the engines are where `publish.transport` reaches them, as soon as Ray has placed them and before a
weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from slimx.cluster.place import place_among, place_of
from slimx.cluster.waiting import gather
from slimx.engines.fleet.group import EngineGroup
from slimx.errors import SlimxError
from slimx.orchestration.ranks.group import RankGroup
from slimx.reshard.packed import PUBLISHER


async def check_reach(trainers: RankGroup, engines: EngineGroup) -> None:
    """Raise SlimxError naming an engine on another machine than the publisher if the transport reaches one machine."""
    config = engines.config
    if not config.publish.one_machine:
        return
    hosts, deadline_s = config.rollout.external_hosts, engines.start_deadline_s
    started = [engine for engine in engines.engines if engine.name not in hosts]
    (publisher,) = await gather(
        [trainers.actors[PUBLISHER].__ray_call__.remote(place_among, list(hosts.values()))],
        what="the look for the publisher's machine",
        holders=[trainers.holder(PUBLISHER)],
        deadline_s=deadline_s,
        logs=trainers.logs[PUBLISHER : PUBLISHER + 1],
    )
    places = await gather(
        [engine.actor.__ray_call__.remote(place_of) for engine in started],
        what="the look for the engines' machines",
        holders=[f"engine {engine.name}" for engine in started],
        deadline_s=deadline_s,
        logs=[engine.log for engine in started],
    )
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    here, beside = publisher
    found = {engine.name: place.node for engine, place in zip(started, places, strict=True)}
    elsewhere = {name: addresses.get(node, node) for name, node in found.items() if node != here}
    elsewhere |= {name: host for name, host in hosts.items() if host not in beside}
    refuse(config.publish.transport, addresses.get(here, here), elsewhere)


def refuse(transport: str, here: str, elsewhere: Mapping[str, str]) -> None:
    """Raise SlimxError if there are engines `elsewhere` (address by name) than at the publisher's address `here`."""
    for name, where in elsewhere.items():
        raise SlimxError(
            f"publish.transport {transport} reaches one machine, and trainer rank {PUBLISHER}, which packs the weights,"
            f" is on {here}, engine {name} on {where}; set it to nixl or disk, or keep the run on one "
            "machine",
            code="publish.reach",
            about=name,
        )
