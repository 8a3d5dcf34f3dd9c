"""Rules about engine groups, and the devices, machines and models that they are meant for; what a group says alone is
checked in `slimx.config.sections.engines`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Cluster
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.layout.kernels import deep_ep_lacks

if TYPE_CHECKING:
    from slimx.models.families import ModelSpec

TRANSFER_PACKAGES = {"mooncake": "mooncake", "mooncake_tcp": "mooncake", "nixl": "nixl"}
"""Package that moves the KV, by value of SGLang's disaggregation_transfer_backend."""


@rule("engines.sizes", "rollout.engines")
def divide_each_other(rollout: Rollout) -> Problems:
    from slimx.layout.ranks import engine_sizes

    for group in rollout.served:
        try:
            engine_sizes(group)
        except SlimxError as error:
            yield str(error)


@rule("engines.urls_colocate", "schedule.colocate")
def placed(rollout: Rollout, schedule: Schedule) -> Problems:
    for group in rollout.policy_engines:
        if group.urls and schedule.colocate:
            yield (
                f"slimx knows no place of servers that run already, and {group.where} has urls; let slimx start them, "
                "or set it to false"
            )


@rule("engines.disaggregated_colocate", "schedule.colocate")
def kept_awake(rollout: Rollout, schedule: Schedule) -> Problems:
    if rollout.disaggregated and schedule.colocate:
        yield (
            "the KV cache of prefill and decode groups is registered for transfers and cannot be released while "
            "they sleep; set it to false"
        )


@rule("engines.disaggregated_stale", "schedule.max_staleness")
def one_version(rollout: Rollout, schedule: Schedule) -> Problems:
    if rollout.disaggregated and schedule.max_staleness:
        yield (
            "with prefill and decode groups a prompt's KV could be computed by one version and sampled from by the "
            "next; set it to 0"
        )


@rule("engines.trusted_network", "cluster.trusted_network")
def trusted(rollout: Rollout, cluster: Cluster) -> Problems:
    for group in rollout.served:
        if group.nodes > 1 and group.dp_attention > 1 and not group.urls and not cluster.trusted_network:
            yield (
                f"{group.where} has dp_attention {group.dp_attention} over {group.nodes} nodes, where SGLang unpickles "
                "what arrives at its sockets: any sender in these machines' networks can run programs on all of them; "
                "set it to true, or to the CIDR of a network that only this run's users reach"
            )


@rule("engines.role_device", "rollout.engines.role")
def moves_kv(rollout: Rollout, device: str) -> Problems:
    for group in rollout.policy_engines:
        if group.role != "regular" and device == "cpu":
            yield (
                f"{group.where} has the role {group.role}, and SGLang moves KV between servers from GPU to GPU only, "
                "by mooncake or nixl; on the CPU use role=regular"
            )


@rule("engines.colocated_ranks", "schedule.colocate")
def shares_gpus(rollout: Rollout, schedule: Schedule, trainer: Trainer, device: str) -> Problems:
    ranks = sum(group.started * group.ranks for group in rollout.policy_engines)
    if schedule.colocate and device == "cuda" and ranks > trainer.world_size:
        yield (
            f"the servers of rollout.engines have {ranks} ranks, a GPU each, and share those of {trainer.world_size} "
            "trainer ranks (trainer.world_size); lower count, or their sizes"
        )


@rule("engines.deep_ep", "rollout.engines.sglang.moe_a2a_backend")
def exchanges(rollout: Rollout, spec: ModelSpec) -> Problems:
    """SGLang's low-latency mode alone has no settings by ranks, nor the kernels between nodes that prompts need."""
    for group in rollout.policy_engines:
        backend, mode = group.sglang.get("moe_a2a_backend"), group.sglang.get("deepep_mode")
        by_deep_ep = backend == "deepep" and mode != "low_latency"
        if by_deep_ep and spec.experts and (lack := deep_ep_lacks(group.tensor, spec.transformer["hidden_size"])):
            yield f"{group.where} has deepep, which {lack}; leave it out, or set another tensor"


@rule("engines.transfer_package", "rollout.engines.sglang.disaggregation_transfer_backend")
def has_transfer(rollout: Rollout, local_device: str) -> Problems:
    for group in rollout.served if local_device == "cuda" else ():
        backend = group.sglang.get("disaggregation_transfer_backend", "mooncake")
        package = TRANSFER_PACKAGES.get(backend)
        if group.role != "regular" and package is not None and importlib.util.find_spec(package) is None:
            yield (
                f"{group.where} has the role {group.role}, whose KV {backend} moves, and the package {package} is not "
                "installed here; install it, or choose another backend"
            )
