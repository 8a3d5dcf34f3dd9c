"""A courier that is killed or stopped is replaced by another one, and its process is gone.

In `make test` test_faults does both to the courier of two engines: one dies in a publication, one stops between two.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray

from slimx.cluster.connection import start_ray, stop_ray
from slimx.cluster.restarts import Restarts
from slimx.config.schema import Config
from slimx.engines.delivery.courier import CourierHandle
from slimx.reshard.parties import TransportLost
from tests.integration.victims import couriers

pytestmark = [pytest.mark.integration, pytest.mark.slow]
GONE_S = 60


class Publisher:
    """An actor on this machine: where it runs, the courier runs."""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=lambda signum: signum.name)
async def test_a_courier_that_is_killed_or_stopped_is_replaced_and_gone(signum: signal.Signals, tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"path": "none"},
            "cluster": {"device": "cpu", "start_deadline": 600},
            "rollout": {"prompts": "none", "health": {"restarts": 1}},
            "publish": {"transport": "gloo", "engine_deadline": 4},
        }
    )
    start_ray(config, "cpu")
    try:
        publisher = ray.remote(Publisher).options(num_cpus=0).remote()
        restarts = Restarts("courier", config.rollout.health, note=print)
        handle = CourierHandle(lambda: publisher, config, tmp_path / "publish", tmp_path / "courier.log", restarts)
        await handle.start()
        (first,) = couriers()
        os.kill(first.pid, signum)
        with pytest.raises(TransportLost):
            await handle.ask("ready")
        first.wait(GONE_S)
        await handle.start()
        assert handle.incarnation == 2 and first not in couriers()
        await handle.ask("ready", deadline_s=600)
        (restart,) = restarts.history
        assert restart.part == "courier" and restart.reason and not restart.error
        await handle.stop()
    finally:
        stop_ray()
