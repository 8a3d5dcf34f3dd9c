"""Rules about the GPUs and nodes that a plan is for, and warnings about layouts that run slowly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Cluster, Numerics
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer
from slimx.layout.kernels import crosses_nodes, unpublishable

if TYPE_CHECKING:
    from slimx.config.schema import Config
    from slimx.extras.planner.memory_record import EngineMemory
    from slimx.extras.planner.record import RankMap, Together
    from slimx.models.families import ModelSpec
    from slimx.preflight.hardware import Machine

CROWDED = 3
"""Requests in flight per rollout of the maximum length that fits into the KV caches, above which a plan warns: rollouts
have about half the maximum length on average."""


@rule("machine.server_nodes", "rollout.engines.nodes")
def spans_nodes(cluster: Cluster, rollout: Rollout, machine: Machine) -> Problems:
    if not cluster.gpu and not cluster.gpus_per_node:
        return
    for group in rollout.served:
        ranks = group.ranks // group.nodes
        if ranks > machine.per_node and not group.urls:
            yield (
                f"a server of {group.where} has {ranks} ranks on each of its {group.nodes} nodes, which have "
                f"{machine.per_node} GPUs; set nodes to {-(-group.ranks // machine.per_node)}, or lower tensor"
            )


@rule("machine.nodes", "cluster.nodes")
def has_nodes(machine: Machine, places: RankMap | Together) -> Problems:
    if machine.nodes is not None and places.nodes > machine.nodes:
        yield (
            f"the run needs {places.gpus} GPUs on {places.nodes} nodes of {machine.per_node}, and cluster.nodes is "
            f"{machine.nodes}; lower trainer.world_size or rollout.engines.count, or raise cluster.nodes"
        )


@rule("machine.flex_backend", "trainer.moe.flex_backend")
def has_dispatcher(trainer: Trainer, machine: Machine) -> Problems:
    from slimx.preflight.hardware import GPUS

    moe = trainer.moe
    if machine.gpu is GPUS["gb300"] and moe.dispatcher == "flex" and moe.flex_backend == "deepep":
        yield (
            "trainer.moe.flex_backend=deepep does not run on cluster.gpu=gb300, whose NVLink domain spans nodes of 4 "
            "GPUs; set trainer.moe.dispatcher=alltoall, or trainer.moe.flex_backend=hybridep if DeepEP is built "
            "from its hybrid-ep branch"
        )


@rule("engines.backend", "rollout.engines.sglang")
def publishes_to_plain_layouts(
    rollout: Rollout, publish: Publish, numerics: Numerics, machine: Machine, spec: ModelSpec
) -> Problems:
    """Refuses kernels for which SGLang keeps weights in unpublishable layouts, as its defaults do on Blackwell. A
    server checks the same when it starts. Exact mode sets its kernels itself."""
    from slimx.preflight.hardware import GPUS

    if machine.gpu is not GPUS["gb300"] or numerics.exact:
        return
    for group in rollout.policy_engines:
        for field, plain in unpublishable(group.sglang, experts=spec.experts > 0, fp8=publish.in_fp8):
            yield (
                f"rollout.engines.sglang.{field}",
                f"with {group.sglang.get(field, 'auto')} SGLang would hold weights of {group.where} in a layout that "
                f"cannot be published on cluster.gpu=gb300; set it to {plain}",
            )


@rule("publish.nodes", "publish.transport")
def reaches_engines(publish: Publish, cluster: Cluster, places: RankMap, device: str) -> Problems:
    """Refuses transports within one machine for engines on other nodes. The rank map gives the node of a server, if the
    sizes of the nodes are known."""
    from slimx.preflight.hardware import nodes_known

    if not nodes_known(cluster, device) or not publish.one_machine:
        return
    publisher = places.trainer[0].node
    for place in places.engines:
        if place.node != publisher:
            yield (
                f"publish.transport {publish.transport} reaches one machine, but the run takes {places.nodes} nodes of "
                f"{places.per_node} GPUs, with server {place.server} of {place.group} on node {place.node} and trainer "
                f"rank 0, which packs the weights, on node {publisher}; set it to auto, nixl or disk"
            )
            return


def machine_warnings(trainer: Trainer, rollout: Rollout, machine: Machine, spec: ModelSpec) -> Iterator[str]:
    """Yields sentences about layouts that run, but slowly."""
    tensors = {"trainer.tensor": trainer.tensor}
    for group in rollout.engines:
        tensors[f"rollout.engines.tensor of {group.name}"] = group.tensor
    for key, size in tensors.items():
        if size > machine.domain:
            yield (
                f"{key}={size} reaches beyond the {machine.domain} GPUs that NVLink joins, so every layer waits for "
                "the network"
            )
    wide = trainer.expert * trainer.expert_tensor_size > machine.domain
    if trainer.moe.dispatcher == "alltoall" and wide and crosses_nodes(spec.transformer["hidden_size"]):
        yield (
            f"trainer.expert={trainer.expert} spans nodes and trainer.moe.dispatcher is alltoall: tokens travel once "
            "per expert, not once per node; flex does better where its kernels are installed"
        )


def start_warnings(config: Config, spec: ModelSpec, device: str) -> Iterator[str]:
    """Yields a sentence if a first start may miss a deadline, which ends the run. The weights may be missing on this
    machine."""
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
            f"cluster.start_deadline={deadline:g} is less than the {seconds:.0f} s that a first start may take to read "
            f"{nbytes / 1e9:.0f} GB of weights and to compile; leave it out or raise it"
        )


def idle_warnings(schedule: Schedule, trainer: Trainer, rollout: Rollout) -> Iterator[str]:
    """Yields sentences about GPUs that idle while engines generate. They follow from which parts may work at the same
    time, not from a prediction of generation times."""
    generating = sum(group.started * group.ranks for group in rollout.policy_engines)
    if not generating:
        return
    if schedule.colocate:
        if generating < trainer.world_size:
            yield (
                f"schedule.colocate: engines have {generating} of the {trainer.world_size} GPUs of trainers, and the "
                f"others idle while they generate; raise rollout.engines.count until all have one"
            )
    elif schedule.max_staleness == 0:
        yield (
            f"schedule.max_staleness is 0: the {trainer.world_size} GPUs of trainers idle while engines generate, and "
            f"the {generating} of engines while trainers train; schedule.max_staleness=1 lets both work at once, one "
            "version apart, and schedule.colocate=true gives GPUs to each in turn"
        )


def crowded_warnings(rollout: Rollout, engines: Iterable[EngineMemory], requests: int) -> Iterator[str]:
    """Yields a sentence if the KV caches of all servers hold less than a third of the rollouts in flight: the others
    wait or are recomputed. `engines`: memory of the groups; `requests`: maximum in flight in all of them."""
    sampling = {group.name for group in rollout.policy_engines if group.role != "prefill"}
    fitting = 0
    for engine in engines:
        if engine.group in sampling and engine.concurrency:
            fitting += engine.count * engine.concurrency
    if 0 < fitting < requests / CROWDED:
        yield (
            f"rollout.engines: {fitting} rollouts of the maximum length fit into the KV caches of all servers, of "
            f"{requests} in flight; give servers more GPUs (tensor, expert, nodes), so that weights take less of each, "
            "raise sglang.mem_fraction_static, or lower rollout.concurrency"
        )


def unused_warnings(rollout: Rollout, cluster: Cluster, places: RankMap | Together) -> Iterator[str]:
    """Yields a sentence about GPUs of the cluster that nothing uses."""
    if not any(group.started for group in rollout.policy_engines):
        return
    if not cluster.nodes or not cluster.gpus_per_node:
        return
    available = cluster.nodes * cluster.gpus_per_node
    if places.gpus < available:
        yield (
            f"the run has work for {places.gpus} of the {available} GPUs of cluster.nodes={cluster.nodes} with "
            f"cluster.gpus_per_node={cluster.gpus_per_node}; raise trainer.world_size or rollout.engines.count"
        )
