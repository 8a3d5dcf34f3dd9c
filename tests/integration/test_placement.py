"""Where trainers and engines take turns, each trainer rank has a GPU of its own and each engine shares one with it.

Ray counts GPUs that it is told of: two are invented here, and nothing uses them.
"""

from __future__ import annotations

import pytest
import ray

from slimx.orchestration.cluster import ENGINE_SHARE, TRAINER_SHARE

pytestmark = pytest.mark.integration
GPUS = 2


class Place:
    def gpus(self) -> list[int]:
        return ray.get_gpu_ids()


def placed(share: float, count: int = GPUS) -> list:
    return [ray.remote(Place).options(num_cpus=0.1, num_gpus=share).remote() for _ in range(count)]


def gpus_of(actors: list) -> list[list[int]]:
    return ray.get([actor.gpus.remote() for actor in actors], timeout=60)


def test_ray_gives_every_trainer_rank_its_own_gpu_and_a_new_engine_the_place_of_the_lost_one():
    ray.init(num_cpus=2, num_gpus=GPUS, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    try:
        trainers, engines = placed(TRAINER_SHARE), placed(ENGINE_SHARE)
        assert sorted(gpus_of(trainers)) == sorted(gpus_of(engines)) == [[gpu] for gpu in range(GPUS)]
        lost = gpus_of(engines)[1]
        ray.kill(engines[1])
        assert gpus_of(placed(ENGINE_SHARE, 1)) == [lost]
    finally:
        ray.shutdown()
