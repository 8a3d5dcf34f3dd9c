"""A machine that is lost with its trainer rank and does not come back: the run goes on with fewer ranks.

Two nodes of Ray stand for machines of one rank each, next to that of the engine.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.integration.runs import completed_steps
from tests.integration.struck import Moment, Struck, config_of, undisturbed

pytestmark = [pytest.mark.integration, pytest.mark.slow("whole runs of 12 steps"), pytest.mark.timeout(3600)]

STEPS = 12
THREADS = 2
"""CPUs of a rank: more than the engine's node has."""
BOUND = 1e-5


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    memory = 80 * 2**20
    head = {"num_cpus": 1, "object_store_memory": memory, "include_dashboard": False}
    machines = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            machines.add_node(num_cpus=THREADS, object_store_memory=memory)
        yield machines
    finally:
        machines.shutdown()


def test_without_the_node_of_a_rank_the_other_one_trains_the_same_batches(
    cluster: Cluster, tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "trainer": {"expert": 1, "threads": THREADS, "watch_deadline": 10},
        "publish": {"transport": "nixl"},
        "recovery": {"trainers": 5, "shrink_after": 20, "mirror_every": 1},
        "track": {"report": False, "tensorboard": False, "rollouts": {"keep": 0}},
    }
    joined = {"cluster": {"ray_address": cluster.address, "start_deadline": 600, "device": "cpu"}}
    config = config_of(tmp_path / "struck", tiny_model, task_of_sums, count=STEPS, replaced=5, **sections | joined)
    # Drivers that are forked have Ray's token; this cluster has none.
    run = Struck(config, cold=True)
    run.process.until(lambda: completed_steps(run.directory) >= 5)
    rank = run.rank(1)
    assert rank is not None
    raylet = rank.parent()
    assert raylet is not None and "raylet" in raylet.name()
    for process in [raylet, *raylet.children(recursive=True)]:
        process.kill()
    run.goes_on(0, completed_steps(run.directory))
    assert run.rank(1) is None and run.rank(0) is not None
    # Ranks of the new sizes are replaced as ever, and from mirrors of their own, which are newer than the checkpoint.
    run.process.until(lambda: completed_steps(run.directory) % 3 == 2)
    struck = completed_steps(run.directory)
    run.strike(Moment("train", 0, signal.SIGKILL))
    run.goes_on(1, struck)
    assert run.process.wait(3000) == 0, run.process.text()
    run.process.assert_nothing_left()
    found = run.metrics()
    assert found[STEPS]["recovery/from_mirrors"] == 1 and found[STEPS]["recovery/trainers"] == 2
    assert [found[step]["recovery/data_parallel"] for step in (5, STEPS)] == [2, 1]
    expected = undisturbed(config_of(tmp_path / "alone", tiny_model, task_of_sums, count=STEPS, replaced=5, **sections))
    for step, row in expected.items():
        if step:
            for name in ("loss/policy", "optim/grad_norm", "kl/rollout", "reward/mean"):
                assert found[step][name] == pytest.approx(row[name], abs=BOUND), (step, name)
