"""Rules about engine groups in combination with devices, machines and models. Faults within a group are found by
`slimx.config.sections.engines`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.general import Cluster, Schedule
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError, counted
from slimx.layout.kernels import deep_ep_lacks

if TYPE_CHECKING:
    from slimx.models.families import ModelSpec

TRANSFER_PACKAGES = {"mooncake": "mooncake", "mooncake_tcp": "mooncake", "nixl": "nixl"}
"""Python packages that transfer the KV cache, by the value of SGLang's disaggregation_transfer_backend."""


@rule("engines.sizes", "rollout.engines")
def has_valid_sizes(served: ServedEngines) -> Problems:
    from slimx.layout.ranks import engine_sizes

    for group in served.groups:
        try:
            engine_sizes(group)
        except SlimxError as error:
            yield group.key, f"{group.where}: {error}"


@rule("engines.urls_colocate", "schedule.colocate")
def has_known_devices(served: ServedEngines, schedule: Schedule) -> Problems:
    for group in served.policy:
        if group.urls and schedule.colocate:
            yield (
                f"schedule.colocate is true, but {group.where} has urls of external servers, whose GPUs slimx cannot "
                "share; remove the group's urls, or set schedule.colocate=false"
            )


@rule("engines.disaggregated_colocate", "schedule.colocate")
def can_sleep(rollout: Rollout, schedule: Schedule) -> Problems:
    if rollout.disaggregated and schedule.colocate:
        yield (
            "schedule.colocate is true, but rollout.engines has prefill and decode servers, whose KV cache is "
            "registered for transfers and cannot be released while trainers run; set schedule.colocate=false"
        )


@rule("engines.disaggregated_stale", "schedule.max_staleness")
def has_one_version(rollout: Rollout, schedule: Schedule) -> Problems:
    if rollout.disaggregated and schedule.max_staleness:
        yield (
            f"schedule.max_staleness is {schedule.max_staleness}, but with the prefill and decode servers in "
            "rollout.engines, the KV cache of a prompt and the tokens sampled from it could come from different weight "
            "versions; set schedule.max_staleness=0"
        )


@rule("engines.trusted_network", "cluster.trusted_network")
def has_trusted_network(served: ServedEngines, cluster: Cluster) -> Problems:
    for group in served.groups:
        if group.nodes > 1 and group.dp_attention > 1 and not group.urls and not cluster.trusted_network:
            yield (
                f"{group.where} has dp_attention={group.dp_attention} on {group.nodes} nodes, where SGLang unpickles "
                "data from its sockets, so any host that can reach these nodes can execute code on them; set "
                "cluster.trusted_network to the CIDR of a network that only this run's users can reach"
            )


@rule("engines.role_device", "rollout.engines.role")
def can_transfer_kv(served: ServedEngines, device: str) -> Problems:
    for group in served.sampling:
        if group.role != "regular" and device == "cpu":
            yield f"{group.where} has the role {group.role}, but SGLang transfers no KV cache on CPUs; set role=regular"


@rule("engines.colocated_ranks", "schedule.colocate")
def shares_gpus(served: ServedEngines, schedule: Schedule, trainer: Trainer, device: str) -> Problems:
    ranks = sum(group.started * group.ranks for group in served.sampling)
    if schedule.colocate and device == "cuda" and ranks > trainer.world_size:
        yield (
            f"schedule.colocate is true, but the policy's servers have {counted(ranks, 'rank')}, more than the "
            f"{counted(trainer.world_size, 'GPU')} of the trainers (trainer.world_size); lower count or tensor in "
            "rollout.engines"
        )


@rule("engines.deep_ep", "rollout.engines.sglang.moe_a2a_backend")
def has_engine_kernels(served: ServedEngines, spec: ModelSpec) -> Problems:
    """Rejects tensor parallel sizes and hidden sizes for which DeepEP has no kernels, except in SGLang's low-latency
    mode."""
    for group in served.policy:
        uses_deep_ep = group.sglang.get("moe_a2a_backend") == "deepep"
        if not uses_deep_ep or group.sglang.get("deepep_mode") == "low_latency" or not spec.experts:
            continue
        lack = deep_ep_lacks(group.tensor, spec.transformer["hidden_size"])
        if lack:
            yield (
                f"{group.key}.sglang.moe_a2a_backend",
                f"{group.where} has sglang.moe_a2a_backend=deepep, but DeepEP {lack}; remove sglang.moe_a2a_backend, "
                "or change the group's number of ranks (tensor)",
            )


@rule("engines.transfer_package", "rollout.engines.sglang.disaggregation_transfer_backend")
def has_transfer(served: ServedEngines, local_device: str) -> Problems:
    if local_device != "cuda":
        return
    for group in served.sampling:
        backend = group.sglang.get("disaggregation_transfer_backend", "mooncake")
        package = TRANSFER_PACKAGES.get(backend)
        if group.role != "regular" and package is not None and importlib.util.find_spec(package) is None:
            yield (
                f"{group.where} has the role {group.role} and transfers the KV cache with {backend}, but the package "
                f"{package} is not installed; install the package, or change sglang.disaggregation_transfer_backend"
            )
