"""Ray for one run: joined if an address is configured, else a local cluster that ends with the run."""

from __future__ import annotations

import logging
import os

import ray

from slimx.config.schema import Config
from slimx.errors import SlimxError


def start_ray(config: Config) -> None:
    """Connect to Ray, or start it on this machine with just the resources that the run asks for."""
    engines = sum(group.count * group.threads for group in config.rollout.engines)
    cpus = config.trainer.world_size * config.trainer.threads + engines
    try:
        if config.cluster.ray_address:
            ray.init(config.cluster.ray_address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                num_cpus=cpus,
                # Shards of a batch are a few MB; weights do not travel through the object store.
                object_store_memory=max(256 * 2**20, int(0.02 * _memory())),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # A dying worker would kill its children at once, the guard of an engine among them, which must live to
                # end the engine in order and to remove what it leaves (slimx.rollout.process).
                _system_config={"kill_child_processes_on_worker_exit": False},
                _node_ip_address="127.0.0.1",
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = config.cluster.ray_address or "on this machine"
        raise SlimxError(f"Ray cannot be started {where}: {' '.join(str(error).split())[:300]}") from error
    have = ray.cluster_resources().get("CPU", 0)
    if have < cpus:
        raise SlimxError(
            f"the Ray cluster has {have:.0f} CPUs, the run needs {cpus} (trainer ranks and engines x threads)"
        )


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def stop_ray() -> None:
    """Leave Ray; a local cluster ends."""
    ray.shutdown()
