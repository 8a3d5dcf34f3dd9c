"""The choice of `publish.transport` where the configuration leaves it open (`auto`).

`slimx plan`, `slimx doctor` and the run itself go by `choose_transport`, which looks at the configuration alone: the
transport that is planned is the one that runs. With cuda_ipc an engine stages in GPU memory, so it is chosen where that
is a bucket (`publish.staging`), not a second model.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.config.sections.publish import Transport
from slimx.preflight.hardware import machine_of, nodes_known


@dataclass(frozen=True, slots=True)
class ChosenTransport:
    """A transport, and the reason for it in a few words."""

    name: Transport
    why: str

    def applied(self, config: Config) -> Config:
        """`config` with this transport in `publish`."""
        return config.model_copy(update={"publish": config.publish.model_copy(update={"transport": self.name})})

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def choose_transport(config: Config, device: str) -> ChosenTransport:
    """The transport of a run on `device`, "cpu" or "cuda": the configured one, or what `auto` stands for."""
    if config.publish.transport != "auto":
        return ChosenTransport(config.publish.transport, "as publish.transport says")
    groups = config.rollout.policy_engines
    if not groups:
        return ChosenTransport("memory", "nothing is published, as the run has no engines")
    apart = _apart(config, device)
    if hosts := config.rollout.external_hosts:
        far = apart or next((f"server {name} runs on {host}" for name, host in hosts.items() if not _here(host)), None)
        if far is not None:
            return ChosenTransport("disk", f"{far}, and servers that slimx did not start read files")
        return ChosenTransport("memory", "servers that run already map it on the trainers' machine")
    in_buckets = config.publish.staging == "bucket"
    if apart is None:
        if device == "cpu":
            return ChosenTransport("memory", "everything is on one machine")
        if in_buckets:
            return ChosenTransport("cuda_ipc", "everything is on one machine, with GPUs")
        why = "everything is on one machine; publish.staging=bucket would choose cuda_ipc, as a bucket fits on the GPUs"
        return ChosenTransport("memory", why)
    return ChosenTransport("nixl", f"{apart}; every trainer rank writes to every engine")


def _apart(config: Config, device: str) -> str | None:
    """The reason why engines may be on other machines than the trainer rank that publishes; None: they are not."""
    cluster = config.cluster
    if (spanning := _spanning(config.rollout.policy_engines)) is not None:
        return spanning
    if cluster.nodes is not None and cluster.nodes > 1:
        return f"cluster.nodes is {cluster.nodes}"
    if nodes_known(cluster, device) and (gpus := _gpus(config)) > (per_node := machine_of(cluster).per_node):
        return f"the run takes {gpus} GPUs, of which a node has {per_node}"
    if cluster.nodes is None and cluster.ray_address is not None:
        return f"the Ray cluster {cluster.ray_address} may have several machines (cluster.nodes=1 says that it has not)"
    return None


def _spanning(groups: tuple[Engines, ...]) -> str | None:
    return next(
        (f"a server of {group.where} spans {group.nodes} machines" for group in groups if group.nodes > 1), None
    )


def _gpus(config: Config) -> int:
    """GPUs of trainers, critic and the policy's engines, as `slimx plan` places them."""
    own = config.critic is not None and config.critic.placement == "own"
    ranks = config.trainer.world_size + (config.as_critic().trainer.world_size if own else 0)
    engines = sum(group.started * group.ranks for group in config.rollout.policy_engines)
    return max(ranks, engines) if config.schedule.colocate else ranks + engines


def _here(host: str) -> bool:
    """True if `host` is this machine on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
