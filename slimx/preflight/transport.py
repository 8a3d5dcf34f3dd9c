"""Choice of the transport of weights for `publish.transport: auto`.

`slimx plan`, `slimx doctor` and the run all use `choose_transport`. It depends on the configuration only, so the
planned transport is the one that the run uses. With cuda_ipc an engine stages weights in GPU memory. So cuda_ipc is
chosen only if one bucket is staged at a time (`publish.staging`), because a second copy of the model might not fit on
the GPU.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from slimx.config.schema import Config
from slimx.config.sections.publish import Transport
from slimx.preflight.hardware import machine_of, nodes_known


@dataclass(frozen=True, slots=True)
class ChosenTransport:
    """Weight transport chosen for a run, with the reason for the choice."""

    name: Transport
    why: str

    def applied(self, config: Config) -> Config:
        """Returns a copy of `config` with this transport in section `publish`."""
        return config.model_copy(update={"publish": config.publish.model_copy(update={"transport": self.name})})

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def choose_transport(config: Config, device: str) -> ChosenTransport:
    """Returns the transport for a run on `device`, "cpu" or "cuda": the configured one or, if it is `auto`, the one
    that slimx chooses, with the reason."""
    if config.publish.transport != "auto":
        return ChosenTransport(config.publish.transport, "set by publish.transport")
    groups = config.served.policy
    if not groups:
        return ChosenTransport("memory", "the run has no engines to publish to")
    remote = _remote(config, device)
    if config.served.external_hosts:
        remote = remote or _remote_server(config.served.external_hosts)
        if remote is not None:
            return ChosenTransport("disk", f"{remote}, and external servers can only read files")
        return ChosenTransport("memory", "external servers on the trainers' machine map shared memory")
    if remote is not None:
        return ChosenTransport("nixl", f"{remote}, so every trainer rank sends to every engine over the network")
    if device == "cpu":
        return ChosenTransport("memory", "everything is on one machine")
    if config.publish.staging == "bucket":
        return ChosenTransport("cuda_ipc", "everything is on one machine, with GPUs")
    why = (
        "everything is on one machine; with publish.staging=bucket, whose buckets fit on the GPUs, it would be cuda_ipc"
    )
    return ChosenTransport("memory", why)


def _remote(config: Config, device: str) -> str | None:
    """Returns the reason why engines may run on machines other than the publishing trainer rank's; None if all run on
    the same machine."""
    cluster = config.cluster
    for group in config.served.policy:
        if group.nodes > 1:
            return f"a server of {group.where} spans {group.nodes} machines"
    if cluster.nodes is not None and cluster.nodes > 1:
        return f"cluster.nodes is {cluster.nodes}"
    if nodes_known(cluster, device):
        gpus = _gpus(config)
        per_node = machine_of(cluster).per_node
        if gpus > per_node:
            return f"the run needs {gpus} GPUs, but a node has only {per_node}"
    if cluster.nodes is None and cluster.ray_address is not None:
        return (
            f"the Ray cluster {cluster.ray_address} may have several machines (set cluster.nodes=1 if it has only one)"
        )
    return None


def _remote_server(hosts: Mapping[str, str]) -> str | None:
    for name, host in hosts.items():
        if not _is_local(host):
            return f"server {name} runs on {host}"
    return None


def _gpus(config: Config) -> int:
    """Returns the number of GPUs that `slimx plan` assigns to trainers, critic and the policy's engines."""
    ranks = config.trainer.world_size
    if config.critic is not None and config.critic.placement == "own":
        ranks += config.as_critic().trainer.world_size
    engines = sum(group.started * group.ranks for group in config.served.policy)
    return max(ranks, engines) if config.schedule.colocate else ranks + engines


def _is_local(host: str) -> bool:
    """Returns True if `host` is a loopback address or localhost, which every machine resolves to itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
