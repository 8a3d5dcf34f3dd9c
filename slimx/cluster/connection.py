"""Ray for one run: joined if an address is configured, else a local cluster that ends with the run.

Ray's own services listen on every interface; its tokens keep strangers out (slimx.cluster.access).
"""

from __future__ import annotations

import logging
import os
import threading

import ray

from slimx.adapters.ray import SearchPath, be_silent, without_unused
from slimx.cluster.access import SYSTEM_CONFIG, local_options
from slimx.cluster.starting import trained_ranks
from slimx.config.schema import Config
from slimx.errors import PartLost, SlimxError

SHUTDOWN_S = 20.0
"""Seconds that Ray gets to end."""
STARTS = 3
"""Starts of a local Ray that a busy machine may need."""
SLOW = "timed out during startup"
"""Words of ray 2.60 for a node that was not there in time."""


def device_of(config: Config) -> str:
    """ "cuda" or "cpu", as configured or as torch sees it."""
    if config.cluster.device != "auto":
        return config.cluster.device
    import torch  # late: what only leaves Ray does without its 2 s

    return "cuda" if torch.cuda.is_available() else "cpu"


def start_ray(config: Config, device: str, *, trainers: bool = True) -> None:
    """Connect to Ray, or start it on this machine, and refuse a run that its resources cannot hold. `trainers`: whether
    it has any."""
    needs = [_needs(own, trainers=trainers) for own in config.by_policy.values()]
    be_silent()
    ranks, engines, cpus = (sum(each) for each in zip(*needs, strict=True))
    try:
        if config.cluster.ray_address:
            ray.init(
                config.cluster.ray_address, job_config=SearchPath(), log_to_driver=False, logging_level=logging.ERROR
            )
        else:
            _start_locally(cpus)
    except SlimxError:
        raise
    except Exception as error:  # Ray raises that very class where a part of it does not come up
        where = config.cluster.ray_address or "on this machine"
        why = " ".join(str(error).split())[:300]
        raise PartLost(f"Ray cannot be started {where}: {why}", code="ray.start", about=where) from error
    gpus = float(ranks + engines) if device == "cuda" else 0.0
    for kind, needed in (("CPU", float(cpus)), ("GPU", gpus)):
        have = ray.cluster_resources().get(kind, 0.0)
        if have < needed:
            stop_ray()
            raise SlimxError(
                f"the Ray cluster has {have:g} {kind}s, the run needs {needed:g} ({ranks} ranks that train, {engines} "
                f"engine ranks, cluster.device {device}); add nodes or lower trainer.world_size or rollout.engines",
                code="cluster.resources",
                about=kind,
            )


def _needs(config: Config, *, trainers: bool) -> tuple[int, int, int]:
    """Ranks that train one policy, ranks of engines with GPUs of their own, and CPUs."""
    threads = sum(group.started * group.ranks * group.threads for group in config.rollout.served)
    # Engines that take turns with trainers have no GPUs of their own.
    apart = config.rollout.frozen_engines if config.schedule.colocate else config.rollout.served
    engines = sum(group.started * group.ranks for group in apart)
    ranks = trained_ranks(config) if trainers else 0
    return ranks, engines, ranks * config.trainer.threads + threads


@without_unused()
def _start_locally(cpus: int) -> None:
    """Start Ray on this machine, again where its node did not come up in the 30 s that Ray gives it."""
    for left in reversed(range(STARTS)):
        try:
            ray.init(
                # Without it Ray would join whatever cluster was started here last.
                address="local",
                **local_options(),
                num_cpus=cpus,
                # Shards of a batch are a few MB, and so are pieces of mirrors; weights do not travel through it.
                object_store_memory=max(256 * 2**20, int(0.02 * _memory())),
                job_config=SearchPath(),
                log_to_driver=False,
                logging_level=logging.ERROR,
                # A dying worker would kill its children at once, the guard of an engine among them, which must live to
                # end the engine in order and to remove what it leaves (slimx.runtime.process).
                _system_config={
                    "kill_child_processes_on_worker_exit": False,
                    # By itself Ray ends this process, in words of its own, a minute after the GCS was lost:
                    # slimx.cluster.watch is earlier, and the end after that may take its time.
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
    """Leave Ray; a local cluster ends. Ray's library waits for ever for a process of its own that is stopped: this does
    not, and what Ray leaves running then ends with this process (slimx.orchestration.lifetime.remains)."""
    leaving = threading.Thread(target=ray.shutdown, name="slimx leaves Ray", daemon=True)
    leaving.start()
    leaving.join(SHUTDOWN_S)
