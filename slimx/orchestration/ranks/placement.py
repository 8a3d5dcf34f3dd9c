"""Machine and GPU of each rank of a group: neighbours in number are neighbours in place.

Ray alone spreads actors over machines once each is half full; tensor-parallel ranks would then talk over the network,
and no machine would be left whole for an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slimx.errors import DeadlineError

DOMAIN, ORDER = "slimx-domain", "slimx-order"
"""Labels of a Ray node: its NVLink domain, and its number in the job (scripts/launch/common.sh)."""


class PackedGpus:
    """GPUs for `count` ranks on as few machines as possible, reserved until `release`."""

    def __init__(self, name: str, count: int, *, cpus: float, deadline_s: float):
        """`name`: of the group of ranks. Raises DeadlineError if they are not free within `deadline_s` seconds."""
        self._group: PlacementGroup | None = placement_group([{"GPU": 1, "CPU": cpus}] * count, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=deadline_s)
        except ray.exceptions.GetTimeoutError:
            self.release()
            raise DeadlineError(f"{count} GPUs for {name}", deadline_s, "other users of the Ray cluster") from None
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        order = {node: number for number, node in enumerate(in_order(ray.nodes()))}
        # Bundles of a machine need not follow one another; ranks must.
        self._bundles = sorted(range(count), key=lambda bundle: (order[nodes[bundle]], bundle))

    def options(self, rank: int) -> dict[str, Any]:
        """Options of the Ray actor of `rank`."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[rank])
        return {"num_gpus": 1, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Give the GPUs back; actors on them end."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def in_order(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of `ray.nodes()`, neighbours next to each other: by NVLink domain, number in the job, address."""

    def place(node: Mapping[str, Any]) -> tuple[str, str, str]:
        labels = node.get("Labels") or {}
        return labels.get(DOMAIN, ""), labels.get(ORDER, ""), node["NodeManagerAddress"]

    return [node["NodeID"] for node in sorted(nodes, key=place)]
