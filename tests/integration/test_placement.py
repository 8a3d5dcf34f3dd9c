"""Trainer ranks get GPUs machine by machine, and engines that take turns with them get the same GPUs.

Ray counts GPUs that are declared to it: two machines with two each are invented here, and nothing uses them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from slimx.cluster.place import Placement, place_of
from slimx.engines.fleet.group import placement_of
from slimx.errors import DeadlineError
from slimx.orchestration.ranks.group import PackedGpus
from tests.refusals import numbers

pytestmark = pytest.mark.integration
MACHINES, GPUS = 2, 2


class Actor:
    def devices(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def cluster() -> Iterator[None]:
    memory = 80 * 2**20
    head = {"num_cpus": 2, "num_gpus": GPUS, "object_store_memory": memory, "include_dashboard": False}
    machines = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(MACHINES - 1):
            machines.add_node(num_cpus=2, num_gpus=GPUS, object_store_memory=memory)
        ray.init(address=machines.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        machines.shutdown()


def test_neighbouring_ranks_share_a_machine_and_engines_their_gpus(cluster: None) -> None:
    gpus = PackedGpus("the trainers", MACHINES * GPUS, cpus=0.1, deadline_s=300)
    actors = [ray.remote(Actor).options(num_cpus=0.1, **gpus.options(rank)).remote() for rank in range(MACHINES * GPUS)]
    places = ray.get([actor.__ray_call__.remote(place_of) for actor in actors], timeout=600)
    assert places[0].node == places[1].node != places[2].node == places[3].node
    assert sorted(place.gpus for place in places) == [("0",), ("0",), ("1",), ("1",)]
    shared = placement_of(places[2:], "actor")
    assert shared == Placement(places[2].node, ("0", "1"))
    engine = ray.remote(Actor).options(**shared.options(cpus=0.1)).remote()
    where = ray.get(engine.__ray_call__.remote(place_of), timeout=600)
    assert where == shared, "an engine that shares GPUs has a place, and sees them alone"
    with pytest.raises(DeadlineError) as caught:
        PackedGpus("another", 1, cpus=0.1, deadline_s=1)
    assert numbers(caught.value.awaited) == [1] and "another" in caught.value.awaited
    gpus.release()
    PackedGpus("another", MACHINES * GPUS, cpus=0.1, deadline_s=300).release()
