"""Whether engine groups can run on the devices that they are meant for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from urllib.parse import urlsplit

from slimx.config.engines import Engines
from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.runtime.ports import is_own

TRANSFER_PACKAGES = {"mooncake": "mooncake", "mooncake_tcp": "mooncake", "nixl": "nixl"}
"""By value of SGLang's disaggregation_transfer_backend the package that moves the KV."""


def check_devices(config: Config, device: str) -> None:
    """Raise SlimxError for groups that cannot run on `device`, share too few GPUs with trainers, or run already where a
    publication would not reach them."""
    for group in config.rollout.policy_engines:
        if group.role != "regular" and device == "cpu":
            raise SlimxError(
                f"rollout.engines group {group.name} has the role {group.role}, and SGLang moves KV between servers "
                "from GPU to GPU only, by mooncake or nixl; on the CPU use role=regular"
            )
    ranks = sum(group.started * group.ranks for group in config.rollout.policy_engines)
    if config.schedule.colocate and device == "cuda" and ranks > config.trainer.world_size:
        raise SlimxError(
            f"schedule.colocate: the servers of rollout.engines have {ranks} ranks, a GPU each, and share those of "
            f"{config.trainer.world_size} trainer ranks (trainer.world_size); lower count, or their sizes"
        )
    if config.publish.one_machine and config.cluster.ray_address is None:  # trainers are here
        for name, host in external_hosts(config).items():
            if not is_own(host):
                raise SlimxError(
                    f"publish.transport {config.publish.transport} reaches the trainers' machine only, and engine "
                    f"{name} runs at {host}, which is no address of it; set publish.transport=disk"
                )


def external_hosts(config: Config) -> dict[str, str]:
    """By engine of the policy that runs already its host."""
    return {
        f"{group.name}-{number}": urlsplit(url).hostname or ""
        for group in config.rollout.policy_engines
        for number, url in enumerate(group.urls)
    }


def server_problems(config: Config, per_node: int) -> Iterator[str]:
    """Servers that do not fit the nodes that they are meant to span, of `per_node` GPUs each."""
    for group in config.rollout.served:
        share = group.ranks // group.nodes
        if share > per_node and not group.urls:
            yield (
                f"a server of rollout.engines group {group.name} has {share} ranks on each of its {group.nodes} nodes, "
                f"which have {per_node} GPUs; set nodes to {-(-group.ranks // per_node)}, or lower tensor"
            )


def check_transfer(group: Engines) -> None:
    """Raise SlimxError if a prefill or decode group's servers, in an environment like this one, could not move KV."""
    backend = group.sglang.get("disaggregation_transfer_backend", "mooncake")
    package = TRANSFER_PACKAGES.get(backend)
    if group.role != "regular" and package is not None and importlib.util.find_spec(package) is None:
        raise SlimxError(
            f"rollout.engines group {group.name} has the role {group.role}, whose KV {backend} moves, and the package "
            f"{package} is not installed here; install it, or choose another disaggregation_transfer_backend in sglang"
        )
