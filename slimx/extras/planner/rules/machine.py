"""Rules about the GPUs and nodes for which a plan is made, and warnings about layouts that run slowly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.general import Cluster, Numerics, Schedule
from slimx.config.sections.publish import Publish
from slimx.config.sections.trainer import Trainer
from slimx.errors import counted
from slimx.layout.kernels import crosses_nodes, unpublishable

if TYPE_CHECKING:
    from slimx.config.schema import Config
    from slimx.extras.planner.memory_record import EngineMemory
    from slimx.extras.planner.record import RankMap, Together
    from slimx.models.families import ModelSpec
    from slimx.preflight.hardware import Machine

CROWDED = 3
"""Ratio of requests in flight to rollouts of maximum length that fit into the KV caches, above which a plan contains a
warning. It is above 1 because rollouts have about half the maximum length on average."""


@rule("machine.server_nodes", "rollout.engines.nodes")
def spans_nodes(cluster: Cluster, served: ServedEngines, machine: Machine) -> Problems:
    if not cluster.gpu and not cluster.gpus_per_node:
        return
    for group in served.groups:
        ranks = group.ranks // group.nodes
        if ranks > machine.per_node and not group.urls:
            yield (
                f"{group.key}.nodes",
                f"{group.where} has nodes={group.nodes}, so a server has {counted(ranks, 'rank')} per node, but a "
                f"node has only {counted(machine.per_node, 'GPU')}; set {group.key}.nodes to "
                f"{-(-group.ranks // machine.per_node)}, or lower {group.key}.tensor",
            )


@rule("machine.nodes", "cluster.nodes")
def has_nodes(machine: Machine, places: RankMap | Together) -> Problems:
    if machine.nodes is not None and places.nodes > machine.nodes:
        yield (
            f"the run needs {counted(places.gpus, 'GPU')} on {counted(places.nodes, 'node')} with "
            f"{counted(machine.per_node, 'GPU')} each, but "
            f"cluster.nodes is {machine.nodes}; raise cluster.nodes, or lower trainer.world_size or "
            "rollout.engines.count"
        )


@rule("machine.flex_backend", "trainer.moe.flex_backend")
def has_dispatcher(trainer: Trainer, machine: Machine) -> Problems:
    from slimx.preflight.hardware import GPUS

    moe = trainer.moe
    if machine.gpu is GPUS["gb300"] and moe.dispatcher == "flex" and moe.flex_backend == "deepep":
        yield (
            "trainer.moe.flex_backend=deepep does not run on cluster.gpu=gb300, whose NVLink domain spans several "
            "nodes of 4 GPUs; set trainer.moe.dispatcher=alltoall, or install DeepEP from its branch `hybrid-ep` and "
            "set trainer.moe.flex_backend=hybridep"
        )


@rule("engines.backend", "rollout.engines.sglang")
def publishes_to_plain_layouts(
    served: ServedEngines, publish: Publish, numerics: Numerics, machine: Machine, spec: ModelSpec
) -> Problems:
    """Rejects kernels for which SGLang keeps weights in layouts that cannot be published, such as SGLang's default
    kernels on Blackwell.

    Every server repeats this check when it starts. Exact mode selects the kernels itself."""
    from slimx.preflight.hardware import GPUS

    if machine.gpu is not GPUS["gb300"] or numerics.exact:
        return
    for group in served.policy:
        for field, plain in unpublishable(group.sglang, experts=spec.experts > 0, fp8=publish.in_fp8):
            yield (
                f"{group.key}.sglang.{field}",
                f"{group.key}.sglang.{field} is {group.sglang.get(field, 'auto')} in {group.where}, for which "
                f"SGLang keeps weights in a layout that cannot be published on cluster.gpu=gb300; set {field}={plain}",
            )


@rule("publish.nodes", "publish.transport")
def reaches_engines(publish: Publish, cluster: Cluster, places: RankMap, device: str) -> Problems:
    """Rejects transports that work only within one machine if engines are on other nodes. Checks nothing if the number
    of GPUs per node is unknown, because the nodes of the servers are then unknown as well."""
    from slimx.preflight.hardware import nodes_known

    if not nodes_known(cluster, device) or not publish.one_machine:
        return
    publisher = places.trainer[0].node
    for place in places.engines:
        if place.node != publisher:
            yield (
                f"publish.transport={publish.transport} works only on one machine, but the run needs {places.nodes} "
                f"nodes of {places.per_node} GPUs, where trainer rank 0, which packs the weights, is on node "
                f"{publisher}, and server {place.server} of engine group {place.group} is on node "
                f"{place.node}; set publish.transport to auto, nixl or disk"
            )
            return


def machine_warnings(trainer: Trainer, served: ServedEngines, machine: Machine, spec: ModelSpec) -> Iterator[str]:
    """Yields warnings about parallel layouts that work, but run slowly."""
    tensors = {"trainer.tensor": trainer.tensor}
    for group in served.groups:
        tensors[f"{group.key}.tensor of {group.name}"] = group.tensor
    for key, size in tensors.items():
        if size > machine.domain:
            yield (
                f"{key} is {size}, but NVLink connects only {machine.domain} GPUs, so every layer waits for the "
                f"network; set {key} to at most {machine.domain}"
            )
    wide = trainer.expert * trainer.expert_tensor_size > machine.domain
    if trainer.moe.dispatcher == "alltoall" and wide and crosses_nodes(spec.transformer["hidden_size"]):
        yield (
            f"with trainer.expert={trainer.expert}, experts are on several nodes, and trainer.moe.dispatcher=alltoall "
            "sends each token once per expert instead of once per node; install the kernels of "
            "trainer.moe.flex_backend, and set trainer.moe.dispatcher=flex"
        )


def start_warnings(config: Config, spec: ModelSpec, device: str) -> Iterator[str]:
    """Yields a warning if a first start may take longer than `cluster.start_deadline`, after which slimx ends the run.
    The size of the weights is computed from the model if they are not on this machine."""
    from slimx.cluster.starting import start_seconds, weight_bytes
    from slimx.layout.number_formats import ITEMSIZE

    deadline = config.cluster.start_deadline
    elements = sum(prod(shape) for shape in spec.table.checkpoint_shapes().values())
    nbytes = max(weight_bytes(config), elements * ITEMSIZE[config.numerics.dtype])
    if device != "cuda" or deadline is None:
        return
    seconds = start_seconds(device, nbytes)
    if deadline < seconds:
        yield (
            f"cluster.start_deadline is {deadline:g} s, but a first start may take {seconds:.0f} s to read "
            f"{nbytes / 1e9:.0f} GB of weights and to compile kernels; set cluster.start_deadline to at least "
            f"{seconds:.0f}, or remove cluster.start_deadline"
        )


def idle_warnings(schedule: Schedule, trainer: Trainer, served: ServedEngines) -> Iterator[str]:
    """Yields warnings about GPUs that are idle while engines generate. The warnings depend on which parts of the run
    can work at the same time, not on predicted generation times."""
    generating = sum(group.started * group.ranks for group in served.sampling)
    if not generating:
        return
    if schedule.colocate:
        if generating < trainer.world_size:
            yield (
                f"with schedule.colocate=true, engines use only {generating} of the trainers' {trainer.world_size} "
                "GPUs, so the other GPUs are idle during generation; raise rollout.engines.count until engines use "
                f"{trainer.world_size} GPUs"
            )
    elif schedule.max_staleness == 0:
        yield (
            f"with schedule.max_staleness=0, GPUs are idle: those of trainers ({trainer.world_size}) while engines "
            f"generate, and those of engines ({generating}) while trainers train; set "
            "schedule.max_staleness=1 to generate and train at the same time, or schedule.colocate=true to let "
            "trainers and engines share GPUs"
        )


def crowded_warnings(served: ServedEngines, engines: Iterable[EngineMemory], requests: int) -> Iterator[str]:
    """Yields a warning if the KV caches of all servers have space for less than a third of the rollouts in flight,
    because the remaining rollouts then wait or are recomputed.

    `engines`: memory of the engine groups. `requests`: maximum number of requests in flight in all groups together."""
    sampling = {group.name for group in served.sampling if group.role != "prefill"}
    fitting = 0
    for engine in engines:
        if engine.group in sampling and engine.concurrency:
            fitting += engine.count * engine.concurrency
    if 0 < fitting < requests / CROWDED:
        yield (
            f"the KV caches of all servers in rollout.engines have space for only {fitting} rollouts of the maximum "
            f"length, but up to {requests} rollouts are in flight; raise rollout.engines.tensor or "
            "rollout.engines.sglang.mem_fraction_static, or lower rollout.concurrency"
        )


def unused_warnings(served: ServedEngines, cluster: Cluster, places: RankMap | Together) -> Iterator[str]:
    """Yields a warning about GPUs of the cluster that the run does not use."""
    if not any(group.started for group in served.policy):
        return
    if not cluster.nodes or not cluster.gpus_per_node:
        return
    available = cluster.nodes * cluster.gpus_per_node
    if places.gpus < available:
        yield (
            f"the run uses only {places.gpus} of the cluster's {available} GPUs (cluster.nodes={cluster.nodes}, "
            f"cluster.gpus_per_node={cluster.gpus_per_node}); raise trainer.world_size or rollout.engines.count"
        )
