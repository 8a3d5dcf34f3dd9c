"""Rules about engine groups and the devices and machines that they are meant for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slimx.config.rule import Told, rule
from slimx.config.sections.engines import Engines
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Cluster, Numerics
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.layout.engine_kernels import unpublishable
from slimx.layout.ranks import engine_sizes
from slimx.models.families import ModelSpec
from slimx.models.flops import delta_net_layers
from slimx.models.schema import read_fields
from slimx.preflight.checks.layout import deep_ep_lacks
from slimx.preflight.hardware import GPUS, Machine
from slimx.runtime.ports import is_own

TRANSFER_PACKAGES = {"mooncake": "mooncake", "mooncake_tcp": "mooncake", "nixl": "nixl"}
"""Package that moves the KV, by value of SGLang's disaggregation_transfer_backend."""


@rule("engines.sizes", about="rollout.engines")
def divide_each_other(rollout: Rollout) -> Iterator[str]:
    for group in rollout.served:
        try:
            engine_sizes(group)
        except SlimxError as error:
            yield str(error)


@rule("engines.role_device", about="rollout.engines.role")
def moves_kv(rollout: Rollout, device: str) -> Iterator[str]:
    for group in rollout.policy_engines:
        if group.role != "regular" and device == "cpu":
            yield (
                f"{group.where} has the role {group.role}, and SGLang moves KV between servers from GPU to GPU only, "
                "by mooncake or nixl; on the CPU use role=regular"
            )


@rule("engines.recurrent_state", about="rollout.engines.sglang")
def states_are_one_requests_own(rollout: Rollout, spec: ModelSpec, device: str) -> Iterator[Told]:
    """Refuse what shares, rolls back or moves the recurrent states of delta nets: none of it was ever compared."""
    for group in rollout.policy_engines if delta_net_layers(spec.transformer) else ():
        where = f"rollout.engines.sglang.{{}} of engine {group.name}".format
        if device == "cuda" and not group.sglang.get("disable_radix_cache"):
            yield (
                "rollout.engines.sglang.disable_radix_cache",
                f"{where('disable_radix_cache')} must be true for {spec.path}: requests would begin from states of "
                "delta nets that SGLang's prefix cache keeps, which were never compared with their own",
            )
        if group.sglang.get("speculative_algorithm"):
            yield (
                "rollout.engines.sglang.speculative_algorithm",
                f"{where('speculative_algorithm')} was never tried with {spec.path}, whose delta nets would have to "
                "take back states of drafted tokens; leave it out",
            )
        if group.role != "regular":
            yield (
                "rollout.engines.role",
                f"{group.where} has the role {group.role}, and servers of {spec.path} would send each other states of "
                "delta nets, which was never tried; use role=regular",
            )


@rule("engines.colocated_ranks", about="schedule.colocate")
def shares_gpus(rollout: Rollout, schedule: Schedule, trainer: Trainer, device: str) -> Iterator[str]:
    ranks = sum(group.started * group.ranks for group in rollout.policy_engines)
    if schedule.colocate and device == "cuda" and ranks > trainer.world_size:
        yield (
            f"schedule.colocate: the servers of rollout.engines have {ranks} ranks, a GPU each, and share those of "
            f"{trainer.world_size} trainer ranks (trainer.world_size); lower count, or their sizes"
        )


@rule("engines.urls_elsewhere", about="publish.transport")
def reaches_servers(rollout: Rollout, publish: Publish, cluster: Cluster, device: str) -> Iterator[str]:
    if not publish.one_machine or cluster.ray_address is not None:  # else trainers are here
        return
    for name, host in external_hosts(rollout).items():
        if not is_own(host):
            yield (
                f"publish.transport {publish.transport} reaches the trainers' machine only, and engine {name} runs at "
                f"{host}, which is no address of it; set publish.transport=disk"
            )


@rule("engines.backend", about="rollout.engines.sglang")
def publishes_to_plain_layouts(
    rollout: Rollout, publish: Publish, numerics: Numerics, machine: Machine, spec: ModelSpec
) -> Iterator[tuple[str, str]]:
    """On Blackwell SGLang's own choices hold weights in other layouts; a server attests the same when it starts. Exact
    mode names its kernels itself."""
    if machine.gpu is not GPUS["gb300"] or numerics.exact:
        return
    for group in rollout.policy_engines:
        for field, plain in unpublishable(group.sglang, experts=spec.experts > 0, fp8=publish.in_fp8):
            yield (
                f"rollout.engines.sglang.{field}",
                f"{group.where}: on cluster.gpu=gb300 SGLang would hold weights in a layout that cannot be published "
                f"with sglang.{field}={group.sglang.get(field, 'auto')}; set it to {plain}",
            )


@rule("engines.deep_ep", about="rollout.engines.sglang.moe_a2a_backend")
def exchanges(rollout: Rollout, spec: ModelSpec) -> Iterator[str]:
    """SGLang's low-latency mode alone has no settings by ranks, nor the kernels between nodes that prompts need."""
    for group in rollout.policy_engines:
        backend, mode = group.sglang.get("moe_a2a_backend"), group.sglang.get("deepep_mode")
        by_deep_ep = backend == "deepep" and mode != "low_latency"
        if by_deep_ep and spec.experts and (lack := deep_ep_lacks(group.tensor, spec)):
            yield (
                f"{group.where}: moe_a2a_backend=deepep is DeepEP, which {lack}; leave moe_a2a_backend out, or set "
                "another tensor"
            )


@rule("engines.fp8_model", about="rollout.engines.model")
def starts_in_fp8(rollout: Rollout, publish: Publish, spec: ModelSpec) -> Iterator[str]:
    """Engines that start from bf16 weights have no place for fp8 ones. A copy that is made later is not looked at."""
    for group, directory, quantisation in _origins(rollout, spec) if publish.in_fp8 else ():
        if not quantisation:
            yield (
                f"publish.quantise={publish.quantise} sends fp8 weights, and {group.where} starts from "
                f"{directory}, which is not in fp8; write a copy with `slimx convert hf-to-fp8` and name it in the "
                "group's model"
            )


@rule("engines.int4_model", about="rollout.engines.model")
def starts_in_what_is_published(rollout: Rollout, publish: Publish, spec: ModelSpec) -> Iterator[str]:
    """Engines that start from INT4 have places for codes alone, and others have none. A copy that is made later is not
    looked at."""
    published = publish.quantise == "int4"
    for group, directory, quantisation in _origins(rollout, spec):
        starts = quantisation.get("quant_method") == "compressed-tensors"
        if starts and not published:
            yield (
                f"{group.where} starts from {directory}, which is in INT4, and publish.quantise is "
                f"{publish.quantise}; set it to int4, or write a bf16 copy (`slimx convert hf-to-megatron`, then "
                "`megatron-to-hf`) and name it in the group's model"
            )
        if published and not starts:
            yield (
                f"publish.quantise=int4 sends INT4 codes, and {group.where} starts from {directory}, which is not in "
                "INT4; write a copy with `slimx convert hf-to-int4` and name it in the group's model"
            )


def _origins(rollout: Rollout, spec: ModelSpec) -> Iterator[tuple[Engines, Path, dict[str, Any]]]:
    """Groups of the policy's engines, the directory that each starts from, if it is there already, and its
    quantization_config. Raises SlimxError for a config.json with a value that no model has."""
    for group in rollout.policy_engines:
        file = Path(group.model or spec.path) / "config.json"
        if file.is_file():
            hf = read_fields(file, getattr(spec.family, "OWN_FIELDS", ()))
            yield group, file.parent, hf.get("quantization_config") or {}


def external_hosts(rollout: Rollout) -> dict[str, str]:
    """Host of each engine of the policy that runs already, by the engine's name."""
    return {
        f"{group.name}-{number}": urlsplit(url).hostname or ""
        for group in rollout.policy_engines
        for number, url in enumerate(group.urls)
    }


@rule("engines.transfer_package", about="rollout.engines.sglang.disaggregation_transfer_backend")
def has_transfer(rollout: Rollout, local_device: str) -> Iterator[str]:
    for group in rollout.served if local_device == "cuda" else ():
        backend = group.sglang.get("disaggregation_transfer_backend", "mooncake")
        package = TRANSFER_PACKAGES.get(backend)
        if group.role != "regular" and package is not None and importlib.util.find_spec(package) is None:
            yield (
                f"{group.where} has the role {group.role}, whose KV {backend} moves, and the package {package} is not "
                "installed here; install it, or choose another disaggregation_transfer_backend in sglang"
            )
