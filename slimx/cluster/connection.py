"""Connection of one run to Ray: to the configured cluster, or to a local one that is started here and ends with the
run.

Ray's services listen on every network interface; a token keeps other clients out (slimx.cluster.access).
"""

from __future__ import annotations

import logging
import math
import os
import threading

import ray

from slimx.adapters.ray import SearchPath, be_silent, without_unused
from slimx.cluster.access import SYSTEM_CONFIG, local_options
from slimx.cluster.starting import trained_ranks, worker_count
from slimx.config.schema import Config
from slimx.errors import PartLost, SlimxError, one_line

SHUTDOWN_S = 20.0
"""Maximum number of seconds to wait for Ray to shut down."""
STARTS = 3
"""Maximum number of attempts to start a local Ray cluster; an attempt can time out on a busy machine."""
SLOW = "timed out during startup"
"""Text in Ray 2.60's error for a node that did not start in time."""


def device_of(config: Config) -> str:
    """Returns "cuda" or "cpu": `cluster.device`, or, if it is auto, the device that torch finds."""
    if config.cluster.device != "auto":
        return config.cluster.device
    import torch  # here, because it takes 2 s and is not needed to disconnect from Ray

    return "cuda" if torch.cuda.is_available() else "cpu"


def start_ray(config: Config, device: str, *, trainers: bool = True) -> None:
    """Connects to the configured Ray cluster, or starts one on this machine.

    `device`: "cuda" or "cpu". `trainers`: True if the run also needs CPUs and GPUs for trainers. Raises SlimxError if
    the cluster has fewer CPUs or GPUs than the run needs."""
    be_silent()
    ranks = engines = cpus = 0
    for policy_config in config.by_policy.values():
        policy_ranks, policy_engines, policy_cpus = _needs(policy_config, trainers=trainers)
        ranks += policy_ranks
        engines += policy_engines
        cpus += policy_cpus
    workers = worker_count(config)
    per_worker = config.rollout.worker_resources
    if workers == 1:  # the driver
        workers = 0
    cpus += math.ceil(workers * per_worker.cpus)
    try:
        if config.cluster.ray_address:
            ray.init(
                config.cluster.ray_address, job_config=SearchPath(), log_to_driver=False, logging_level=logging.ERROR
            )
        else:
            _start_locally(cpus)
    except SlimxError:
        raise
    except Exception as error:  # Ray raises plain Exception if one of its processes does not start
        address = config.cluster.ray_address
        where = f"reached at {address}" if address else "started on this machine"
        raise PartLost(
            f"Ray cannot be {where} ({one_line(error)}); see session_latest/logs of Ray's temporary directory",
            code="ray.start",
            about=address or "on this machine",
        ) from error
    gpus = workers * per_worker.gpus
    if device == "cuda":
        gpus += ranks + engines
    for kind, needed in (("CPU", float(cpus)), ("GPU", gpus)):
        available = ray.cluster_resources().get(kind, 0.0)
        if available < needed:
            stop_ray()
            raise SlimxError(
                f"the Ray cluster has {available:g} of the {needed:g} {kind}s that the run needs (trainer ranks: "
                f"{ranks}, engine ranks: {engines}, cluster.device={device}); add nodes, or lower trainer.world_size "
                "or rollout.engines.count",
                code="cluster.resources",
                about=kind,
            )


def _needs(config: Config, *, trainers: bool) -> tuple[int, int, int]:
    """Returns the numbers of trainer ranks, of engine ranks with dedicated GPUs, and of CPUs that one policy needs."""
    ranks = trained_ranks(config) if trainers else 0
    cpus = ranks * config.trainer.threads
    engines = 0
    for group in config.served.groups:
        cpus += group.started * group.ranks * group.threads
        # Colocated engines have no dedicated GPUs.
        if not (config.schedule.colocate and group in config.served.sampling):
            engines += group.started * group.ranks
    return ranks, engines, cpus


@without_unused()
def _start_locally(cpus: int) -> None:
    """Starts a Ray cluster with `cpus` CPUs on this machine; retries if the node does not start within Ray's limit of
    30 s."""
    for left in reversed(range(STARTS)):
        try:
            ray.init(
                # By default Ray would join the cluster that was last started on this machine.
                address="local",
                **local_options(),
                num_cpus=cpus,
                # Batch shards and pieces of mirrored state have a few MB each; weights do not pass through it.
                object_store_memory=max(256 * 2**20, int(0.02 * _memory())),
                job_config=SearchPath(),
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Otherwise a worker that dies kills its children at once, including an engine's guard, which has to
                # stop the engine cleanly and remove its files (slimx.runtime.process).
                _system_config={
                    "kill_child_processes_on_worker_exit": False,
                    # By default Ray exits this process a minute after losing the GCS. slimx.cluster.watch detects
                    # the loss earlier, and the shutdown that follows may take longer.
                    "gcs_rpc_server_reconnect_timeout_s": 600,
                    **SYSTEM_CONFIG,
                },
            )
            return
        except Exception as error:
            if not left or SLOW not in str(error):
                raise
            stop_ray()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def stop_ray() -> None:
    """Disconnects from Ray, which ends a local cluster.

    Waits at most `SHUTDOWN_S` seconds, because Ray's library blocks forever if one of its processes is stopped.
    Processes that remain are ended with this process (slimx.orchestration.lifetime.leftovers)."""
    leaving = threading.Thread(target=ray.shutdown, name="slimx leaves Ray", daemon=True)
    leaving.start()
    leaving.join(SHUTDOWN_S)
